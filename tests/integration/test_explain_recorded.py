"""Runs of the scripts with planted causes, kept by `benchmarks/explain.py --record`: the analysis
must name what was planted, and must not name it once it was removed."""

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
CEILING_OFF = {"cpu": 0.25, "gpu": 0.15}
SCRIPTS = {script.name: script for script in planted_scripts()}
FIXED = [name for name in SCRIPTS if (RECORDED / f"{name}-fixed.tar.xz").exists()]


def explained(name: str, folder: Path) -> Diagnosis:
    return open_run(unpack(RECORDED / f"{name}.tar.xz", folder)).explained()


def expected(script: Planted) -> tuple[str, ...]:
    return HEALTHY if script.cause == "healthy" else (script.cause,)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_planted_cause_is_named_first(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    diagnosis = explained(name, tmp_path)
    assert diagnosis.first.cause in expected(script), diagnosis.first
    assert diagnosis.first.healthy == (script.cause in HEALTHY or script.cause == "healthy")
    assert diagnosis.first.evidence
    assert diagnosis.first.recommendations


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_else_is_named_with_high_confidence_and_a_higher_ceiling(
    name: str, tmp_path: Path
) -> None:
    first, *others = explained(name, tmp_path).findings
    for other in others:
        sure = other.confidence == "high" and not other.healthy
        most = max(first.speedup_bound or 1.0, 1.2)
        assert not sure or (other.speedup_bound or 1.0) <= most, other


@pytest.mark.parametrize("name", FIXED)
def test_a_cause_that_was_removed_is_not_named_for_sure(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    first = explained(f"{name}-fixed", tmp_path).first
    still = first.cause == script.cause and first.confidence == "high"
    assert not still or script.name in LESS_NOT_NONE, first


LESS_NOT_NONE = ("cpu_communication",)
"""Gradients are exchanged less often once fixed, but exchanged they are."""


@pytest.mark.parametrize("name", FIXED)
def test_the_ceiling_is_what_removing_the_cause_gave(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    speeds = json.loads((RECORDED / "speeds.json").read_text())
    measured = speeds[f"{name}-fixed"] / speeds[name]
    predicted = explained(name, tmp_path).first.speedup_bound
    assert predicted is not None
    assert measured == pytest.approx(predicted, rel=CEILING_OFF[script.device])


def test_every_script_has_a_kept_run() -> None:
    assert len(SCRIPTS) >= 18
    assert {
        path.name.partition(".")[0].removesuffix("-fixed") for path in RECORDED.glob("*.xz")
    } == set(SCRIPTS)


def texts(told: Any) -> Iterator[str]:
    """All texts in nested facts."""
    if isinstance(told, dict):
        for key, value in told.items():
            yield str(key)
            yield from texts(value)
    elif isinstance(told, list):
        for value in told:
            yield from texts(value)
    elif isinstance(told, str):
        yield told


def test_kept_runs_tell_nothing_of_the_machine_they_came_from(tmp_path: Path) -> None:
    for archive in RECORDED.glob("*.tar.xz"):
        run = open_run(unpack(archive, tmp_path))
        names = [text for process in run.processes for text in process.names.values()]
        for text in [*texts(run.json), *names]:
            found = ABSOLUTE.findall(text)
            assert set(found) <= {"/home/user", "/sys/fs/cgroup", "/proc/PID/net/dev"}, (
                archive.name,
                text,
            )


ABSOLUTE = re.compile(r"(?:^|(?<=[\s'\"(=]))/\w[\w./-]*")
"""A path from the root on, wherever it stands in a text."""
