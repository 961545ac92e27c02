"""Recorded runs of the scripts with planted bottlenecks (`benchmarks/explain.py --record`).

The analysis must find the planted bottleneck, and must not find it once it was removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planted import RECORDED, Planted, planted_scripts, unpack
from stepscope.opened_run import open_run
from stepscope.records import Diagnosis

HEALTHY = ("cpu.compute", "gpu.compute", "gpu.bandwidth")
BOUND_TOLERANCE = {"cpu": 0.25, "gpu": 0.15}
SCRIPTS = {script.name: script for script in planted_scripts()}
FIXED = [name for name in SCRIPTS if (RECORDED / f"{name}-fixed.tar.xz").exists()]


def explained(name: str, folder: Path) -> Diagnosis:
    return open_run(unpack(RECORDED / f"{name}.tar.xz", folder)).explain()


def expected(script: Planted) -> tuple[str, ...]:
    return HEALTHY if script.cause == "healthy" else (script.cause,)


@pytest.mark.parametrize("name", SCRIPTS)
def test_planted_cause_is_first(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    diagnosis = explained(name, tmp_path)
    assert diagnosis.first.cause in expected(script), diagnosis.first
    assert diagnosis.first.healthy == (script.cause in HEALTHY or script.cause == "healthy")
    assert diagnosis.first.evidence
    assert diagnosis.first.recommendations


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_other_finding_has_high_confidence_and_a_higher_bound(name: str, tmp_path: Path) -> None:
    first, *others = explained(name, tmp_path).findings
    for other in others:
        is_clear = other.confidence == "high" and not other.healthy
        highest = max(first.speedup_bound or 1.0, 1.2)
        assert not is_clear or (other.speedup_bound or 1.0) <= highest, other


@pytest.mark.parametrize("name", FIXED)
def test_removed_cause_is_not_found_with_high_confidence(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    first = explained(f"{name}-fixed", tmp_path).first
    is_found = first.cause == script.cause and first.confidence == "high"
    assert not is_found or script.name in ONLY_REDUCED, first


ONLY_REDUCED = ("cpu_communication",)
"""The fixed script exchanges gradients less often, but still exchanges them."""


@pytest.mark.parametrize("name", FIXED)
def test_bound_matches_the_measured_speedup(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    speeds = json.loads((RECORDED / "speeds.json").read_text())
    measured = speeds[f"{name}-fixed"] / speeds[name]
    predicted = explained(name, tmp_path).first.speedup_bound
    assert predicted is not None
    assert measured == pytest.approx(predicted, rel=BOUND_TOLERANCE[script.device])


def test_every_script_has_a_recorded_run() -> None:
    assert len(SCRIPTS) >= 18
    assert {
        path.name.partition(".")[0].removesuffix("-fixed") for path in RECORDED.glob("*.xz")
    } == set(SCRIPTS)


def texts(facts: Any) -> Iterator[str]:
    """Yield all texts in nested facts."""
    if isinstance(facts, dict):
        for key, value in facts.items():
            yield str(key)
            yield from texts(value)
    elif isinstance(facts, list):
        for value in facts:
            yield from texts(value)
    elif isinstance(facts, str):
        yield facts


def test_recorded_runs_contain_no_paths_of_the_machine(tmp_path: Path) -> None:
    for archive in RECORDED.glob("*.tar.xz"):
        run = open_run(unpack(archive, tmp_path))
        names = [text for process in run.processes for text in process.names.values()]
        for text in [*texts(run.json), *names]:
            paths = ABSOLUTE.findall(text)
            assert set(paths) <= {"/home/user", "/sys/fs/cgroup", "/proc/PID/net/dev"}, (
                archive.name,
                text,
            )


ABSOLUTE = re.compile(r"(?:^|(?<=[\s'\"(=]))/\w[\w./-]*")
"""An absolute path anywhere in a text."""
