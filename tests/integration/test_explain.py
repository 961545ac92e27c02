"""`stepscope run` of scripts with a planted cause, end to end: what the user is told."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import STEPSCOPE, Finished
from planted import Planted, planted_scripts
from stepscope.analysis.bottleneck.case import Case
from stepscope.runs.load import load

pytestmark = pytest.mark.quiet

MINUTES = pytest.mark.long  # kept runs of them are explained in any case
SCRIPTS = {script.name: script for script in planted_scripts("cpu")}
OTHERS_CORES = 0.25
"""Where other processes use more than that, workers have no core to go to, and rightly so."""


def judged(done: Finished) -> tuple[str, dict[str, Any]]:
    """The cause that is told first, but for others beside the tests, and all that is told."""
    assert done.code == 0, done.err
    told = json.loads((done.run.path / "derived" / "findings.json").read_text())
    causes = [each["cause"] for each in told["findings"] if each["cause"] != "interference.cpu"]
    return (causes or ["interference.cpu"])[0], told


def watched_alone(watch: Callable[..., Finished], script: Planted) -> Finished:
    """A run of a script; where other processes take the cores, up to three are tried."""
    for _ in range(3):
        done = watch(*script.command(fixed=False, seconds=8), timeout=110)
        cause, _ = judged(done)
        others = Case(load(done.run)).cores.others or 0.0
        if cause == script.cause or others < OTHERS_CORES:
            return done
        shutil.rmtree(done.run.path)
    pytest.skip("other processes took the cores in three runs")


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("cpu_throttled_reads", "local disk", "DataLoader("),
        pytest.param("cpu_slow_checkpoints", "save less often", "torch.save", marks=MINUTES),
        pytest.param("cpu_slow_collate", "collate_fn", "DataLoader(", marks=MINUTES),
        ("cpu_no_workers", "num_workers=", "DataLoader("),
    ],
)
def test_a_planted_cause_is_told_at_the_end_of_the_run(
    name: str, change: str, line: str, watch: Callable[..., Finished]
) -> None:
    script = SCRIPTS[name]
    done = watched_alone(watch, script)
    cause, told = judged(done)
    assert cause == script.cause, told["says"]
    found = [each for each in told["findings"] if each["cause"] == script.cause]
    assert found[0]["ceiling"] > 1.1
    advice = found[0]["advice"]
    assert any(change in each["change"] for each in advice)
    lines = [each for each in advice if each["line"]]
    assert any(line in each["line"] for each in lines)
    assert any(each["where"].partition(":")[0].endswith(script.path.name) for each in lines)
    assert "stepscope explain" in done.err
    page = done.run.paths.report_html.read_text()
    assert told["says"].split(":")[0][:40] in page


def test_explain_of_a_run_that_was_watched_without_the_hook_says_so(
    watch: Callable[..., Finished],
) -> None:
    script = SCRIPTS["cpu_healthy"]
    done = watch(*script.command(fixed=False, seconds=5), options=["--no-hook", "--quiet"])
    explained = subprocess.run(
        [*STEPSCOPE, "explain", str(done.run.path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(explained.stdout)
    assert told["weak"]
    assert told["confidence"] != "high" or told["findings"][0]["cause"] == "interference.cpu"
    assert "no steps were seen" in told["basis"]


def test_a_run_too_short_says_so(watch: Callable[..., Finished]) -> None:
    done = watch(*SCRIPTS["cpu_too_short"].command(fixed=False), options=["--json"])
    told = json.loads(done.out.splitlines()[-1])  # what the script printed comes before
    assert told["explained"]["cause"] == "short"


def test_explain_of_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*STEPSCOPE, "explain", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 2
