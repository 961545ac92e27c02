"""Verdicts on runs that never were: what a person would see, and whatever else could be said."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from stepscope.records import Advice, Evidence, Finding, Verdict

UNITS = ("share", "s", "cores", "bytes", "bytes/s", "count", "1/s", "times", "W", "MHz")

WORKERS = Finding(
    cause="input.workers",
    title="too few loader workers",
    says="Training waits for its next batch 62 % of the time: one worker prepares a batch in "
    "183 ms, a step takes 70 ms.",
    confidence="high",
    because="the loader, the stack samples and the CPU time of the worker agree",
    ceiling=2.63,
    evidence=(
        Evidence("waited for the next batch", 0.62, "share", "input_wait", 0.1, "loader"),
        Evidence("a worker takes for a batch", 0.183, "s", None, None, "stack samples"),
        Evidence("a step without the wait", 0.00007, "s", None, None, "loader"),
        Evidence("cores that were left idle", 6.9, "cores", "idle_cores", 0.5, "/proc"),
    ),
    advice=(
        Advice(
            "num_workers=3",
            "three workers prepare a batch every 61 ms, less than the 70 ms of a step",
            "train.py:41",
            "    loader = DataLoader(data, batch_size=64, num_workers=1, shuffle=True)",
        ),
        Advice(
            "Decode the images once and keep them as tensors",
            "84 % of a worker's time is PIL.Image.open",
            "data.py:17",
            "image = Image.open(self.files[index]).convert('RGB')",
        ),
        Advice("persistent_workers=True", "starting them takes 2.1 s of each epoch"),
    ),
)
COPIES = Finding(
    cause="transfer",
    title="copies from memory that is not pinned",
    says="Copies to the GPU take 8 % of the time, at 3.1 GB/s.",
    confidence="medium",
    because="the time of copies is known, that of their overlap is not",
    ceiling=1.09,
    evidence=(
        Evidence("to the GPU", 3.1e9, "bytes/s", "pinned_copy", 10e9, "NVML"),
        Evidence("copies took", 0.08, "share", "transfer_share", 0.05, "profiler"),
    ),
    advice=(Advice("pin_memory=True", "", "train.py:41", "loader = DataLoader(data)"),),
)
LEAK = Finding(
    cause="leak.host",
    title="host memory grows",
    says="Host memory grows by 1.2 MB a second and will reach its limit of 16 GB in 3 h 20 min.",
    confidence="high",
    because="it grew in every one of 12 epochs",
    ceiling=1.0,
    evidence=(Evidence("growth", 1.2e6, "bytes/s", "leak_slope", 1e5, "/proc"),),
    advice=(Advice("losses.append(loss.item())", "it keeps every graph", "train.py:63",
                   "losses.append(loss)"),),
)  # fmt: skip
COMPUTE = Finding(
    cause="gpu.compute",
    title="the GPU computes all the time",
    says="The GPU is busy 97 % of the time and its tensor cores 61 %: this is how it should be.",
    confidence="high",
    because="GPM tells what its units do, and no step waited",
    ceiling=1.0,
    healthy=True,
    evidence=(Evidence("multiprocessors at work", 0.97, "share", "gpu_busy", 0.9, "GPM"),),
)
CPU_ALONE = Finding(
    cause="cpu.full",
    title="all CPUs are in use",
    says="All 2 CPUs that it may use were in use 96 % of the time.",
    confidence="low",
    because="no steps were seen: what the CPUs worked on is not known",
    ceiling=None,
    evidence=(Evidence("in use of what is allowed", 0.96, "share", "cpu_full", 0.9, "/proc"),),
    advice=(Advice("Give it more CPUs: --cpus 4, or a larger quota of the container"),),
)

BAD = Verdict(
    findings=(WORKERS, COPIES, LEAK),
    next="With the wait gone, the GPU would be busy 91 % of the time: that is as fast as it gets.",
    basis="steps 21 to 412 of 420, from 14.2 s to 88.0 s; the first 20 were warm-up",
    begin_s=14.2,
    end_s=88.0,
)
HEALTHY = Verdict(
    findings=(COMPUTE,),
    next=None,
    basis="steps 10 to 900 of 912, from 8.1 s to 61.3 s",
    begin_s=8.1,
    end_s=61.3,
)
WEAK = Verdict(
    findings=(CPU_ALONE,),
    next=None,
    basis="the whole run but its first 10 %, from 6.0 s to 60.0 s; no steps were seen",
    begin_s=6.0,
    end_s=60.0,
    weak=True,
)

_TEXTS = st.text(max_size=100)
_NUMBERS = st.floats(-1e30, 1e30) | st.sampled_from((math.nan, math.inf, -math.inf))
_EVIDENCE = st.builds(
    Evidence,
    what=_TEXTS,
    value=_NUMBERS,
    unit=st.sampled_from(UNITS) | _TEXTS,
    threshold=st.none() | _TEXTS,
    limit=st.none() | _NUMBERS,
    source=_TEXTS,
)
_ADVICE = st.builds(
    Advice, change=_TEXTS, why=_TEXTS, where=st.none() | _TEXTS, line=st.none() | _TEXTS
)
_FINDINGS = st.builds(
    Finding,
    cause=_TEXTS,
    title=_TEXTS,
    says=_TEXTS,
    confidence=st.sampled_from(("high", "medium", "low")),
    because=_TEXTS,
    ceiling=st.none() | _NUMBERS,
    healthy=st.booleans(),
    evidence=st.lists(_EVIDENCE, max_size=2).map(tuple),
    advice=st.lists(_ADVICE, max_size=2).map(tuple),
)
verdicts = st.builds(
    Verdict,
    findings=st.lists(_FINDINGS, min_size=1, max_size=2).map(tuple),
    next=st.none() | _TEXTS,
    basis=_TEXTS,
    begin_s=_NUMBERS,
    end_s=_NUMBERS,
    weak=st.booleans(),
)
"""Any verdict that the records allow."""
