"""Synthetic diagnoses: realistic ones, and strategies for arbitrary ones."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from stepscope.records import Basis, CodeLocation, Diagnosis, Evidence, Finding, Recommendation
from stepscope.report.bottleneck.view import (
    DiagnosisView,
    EvidenceRow,
    FindingView,
    RecommendationView,
)

UNITS = ("share", "s", "cores", "bytes", "bytes/s", "count", "1/s", "times", "W", "MHz")
LOADER = CodeLocation(
    "train.py:41", "    loader = DataLoader(data, batch_size=64, num_workers=1, shuffle=True)"
)

WORKERS = Finding(
    cause="input.workers",
    confidence="high",
    speedup_bound=2.63,
    values={"workers": 1},
    variant="few",
    reasons=("wait_measured",),
    evidence=(
        Evidence("data_wait", 0.62, "share", "data_wait", 0.1, "loader"),
        Evidence("batch_preparation", 0.183, "s", None, None, "workers"),
        Evidence("step_without_wait", 0.070, "s", None, None, "steps"),
        Evidence("cores_idle", 6.9, "cores", "idle_cores", 0.5, "/proc"),
    ),
    recommendations=(
        Recommendation("enough_workers", "workers", 3, LOADER),
        Recommendation(
            "vectorize_collation",
            location=CodeLocation("data.py:17", "return [pad(each) for each in samples]"),
        ),
        Recommendation("keep_workers", "persistent", True),
    ),
)
WORKERS_SUMMARY = (
    "Training waits for data 62% of the time: 1 loader worker cannot keep up while 6.9 cores are "
    "idle."
)
COPIES = Finding(
    cause="gpu.transfer",
    confidence="medium",
    speedup_bound=1.09,
    values={"copied": 150e6},
    variant="unpinned",
    evidence=(
        Evidence("kernel_time", 0.92, "share", "gpu_busy", 0.85, "GPM"),
        Evidence("pcie_received", 3.1e9, "bytes/s", "copy_rate", 10e9, "GPM"),
        Evidence("copying", 0.08, "share", "copy_share", 0.05, "stack samples"),
    ),
    recommendations=(Recommendation("pin_memory", "pin", True, LOADER),),
)
LEAK = Finding(
    cause="leak.host",
    confidence="high",
    speedup_bound=1.0,
    values={"process": "main", "seconds_left": 12000.0},
    evidence=(Evidence("growth", 1.2e6, "bytes/s", "growth_bytes", 1e5, "/proc"),),
    recommendations=(
        Recommendation(
            "find_growth_in_loop", location=CodeLocation("train.py:63", "losses.append(loss)")
        ),
    ),
)
COMPUTE = Finding(
    cause="gpu.compute",
    confidence="high",
    speedup_bound=1.0,
    healthy=True,
    evidence=(
        Evidence("kernel_time", 0.97, "share", "gpu_busy", 0.85, "GPM"),
        Evidence("sm_active", 0.9, "share", "gpu_filled", 0.5, "GPM"),
        Evidence("tensor_cores", 0.61, "share", None, None, "GPM"),
    ),
)
STORAGE = Finding(
    cause="io.wait",
    confidence="low",
    speedup_bound=None,
    variant="resources",
    reasons=("no_steps",),
    evidence=(Evidence("io_pressure", 0.96, "share", "data_wait_high", 0.2, "PSI"),),
    recommendations=(Recommendation("mark_steps"),),
)

BAD = Diagnosis(
    findings=(WORKERS, COPIES, LEAK),
    next=COMPUTE,
    basis=Basis(seconds=73.8, steps=391, warmup=20),
    begin_s=14.2,
    end_s=88.0,
)
HEALTHY = Diagnosis(
    findings=(COMPUTE,),
    next=None,
    basis=Basis(seconds=53.2, steps=890, warmup=10),
    begin_s=8.1,
    end_s=61.3,
)
WEAK = Diagnosis(
    findings=(STORAGE,),
    next=None,
    basis=Basis(seconds=54.0, steps=None, hook="disabled"),
    begin_s=6.0,
    end_s=60.0,
)

_TEXTS = st.text(max_size=100)
_NUMBERS = st.floats(-1e30, 1e30) | st.sampled_from((math.nan, math.inf, -math.inf))
_EVIDENCE = st.builds(
    EvidenceRow,
    name=_TEXTS,
    value=_NUMBERS,
    unit=st.sampled_from(UNITS) | _TEXTS,
    threshold=st.none() | _TEXTS,
    limit=st.none() | _NUMBERS,
    source=_TEXTS,
)
_FINDINGS = st.builds(
    FindingView,
    cause=_TEXTS,
    title=_TEXTS,
    summary=_TEXTS,
    tone=st.sampled_from(("good", "warning", "neutral")),
    confidence=st.sampled_from(("high", "medium", "low")),
    reason=_TEXTS,
    speedup_bound=st.none() | _NUMBERS,
    evidence=st.lists(_EVIDENCE, max_size=2).map(tuple),
    recommendations=st.lists(
        st.builds(
            RecommendationView,
            change=_TEXTS,
            reason=_TEXTS,
            location=st.none() | _TEXTS,
            code=st.none() | _TEXTS,
        ),
        max_size=2,
    ).map(tuple),
)
views = st.builds(
    DiagnosisView,
    findings=st.lists(_FINDINGS, min_size=1, max_size=2).map(tuple),
    next=_TEXTS,
    basis=_TEXTS,
    begin_s=_NUMBERS,
    end_s=_NUMBERS,
    without_steps=st.booleans(),
)
"""Arbitrary diagnoses."""
