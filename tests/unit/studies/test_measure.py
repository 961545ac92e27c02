"""Ledger lines from real run folders of synthetic trials."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.records import ExitStatus, Outcome
from stepscope.studies.folder import StudyPaths
from stepscope.studies.measure import is_infrastructure, measure_trial
from stepscope.studies.results import Result
from stepscope.studies.scan import StudyScan, scan_folder
from studies import design, planted_environment, study

DESIGN = "factors: {batch_size: [16, 64]}\nblocks: {reruns: 0, reference: none}\n"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "garbage": lambda file: file.write_bytes(random.Random(6).randbytes(500)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "other JSON": lambda file: file.write_text("[[1]]"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with two trials: one trained, one ran out of memory."""
    folder = tmp_path_factory.mktemp("measured")
    env = planted_environment(
        folder, formula="10 * batch_size", oom="batch_size == 64", memory="1e9"
    )
    ended = study("run", design(folder, DESIGN), "--out", folder, env=env)
    assert ended.returncode == 0, ended.stderr
    return folder / "planted"


@pytest.fixture
def paths(done: Path, tmp_path: Path) -> StudyPaths:
    return StudyPaths(Path(shutil.copytree(done, tmp_path / "study")))


def measured(folder: Path, blank: Result) -> Result:
    return measure_trial(folder, blank).result


def by_outcome(scan: StudyScan) -> dict[Outcome, Result]:
    return {result.outcome: result for result in scan.results}


def test_the_values_of_a_trial_that_trained(paths: StudyPaths) -> None:
    result = by_outcome(scan_folder(paths, measured))[Outcome.OK]
    assert result.throughput == pytest.approx(160.0, rel=1e-6)
    assert result.values["step_seconds"] == pytest.approx(0.1, rel=1e-6)
    assert result.values["gpu_memory_peak"] == 1e9
    assert result.low is not None and result.high is not None and result.low < 160 < result.high
    assert 0 < result.seconds < 30 and result.started > 1.6e9
    assert (result.role, result.repeat, result.attempt, result.block) == ("trial", 1, 1, 1)
    assert result.settings["batch_size"] == 16 and result.reason == ""


def test_an_oom_is_a_result(paths: StudyPaths) -> None:
    result = by_outcome(scan_folder(paths, measured))[Outcome.GPU_OOM]
    assert result.is_result and result.throughput is None and "memory" in result.reason
    assert result.settings["batch_size"] == 64


def test_the_ledger_is_restored_from_run_folders(paths: StudyPaths) -> None:
    def refuse(folder: Path, blank: Result) -> Result:
        raise AssertionError("the ledger has it")

    before = scan_folder(paths, refuse).results
    shutil.rmtree(paths.ledger)
    for folder in paths.folder.glob("*/r*a*"):
        shutil.rmtree(folder / "derived", ignore_errors=True)
    restored = scan_folder(paths, measured)
    assert sorted(restored.results, key=lambda r: r.key) == sorted(before, key=lambda r: r.key)
    assert restored.unwritten == restored.results


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_study_with_a_damaged_run_can_be_read(done: Path, tmp_path: Path, damage: str) -> None:
    names = [path.relative_to(done) for path in sorted(done.glob("*/r1a1/**/*")) if path.is_file()]
    assert {"run.json", "rank0.json"} <= {name.name for name in names}
    for number, name in enumerate(names):
        paths = StudyPaths(tmp_path / str(number))
        shutil.copytree(done, paths.folder, ignore=shutil.ignore_patterns("ledger", "derived"))
        DAMAGE[damage](paths.folder / name)
        scan = scan_folder(paths, measured)
        assert len(scan.results) == 2, name
        lost = [result for result in scan.results if result.outcome is Outcome.LOST]
        assert all(result.key == name.parts[0] for result in lost), "the other one counts"
        assert len(scan.remarks) <= len(lost)
        if name.name == "run.json":
            assert lost
        elif lost:
            assert scan.remarks, name


def ended(reason: str = "", signal: str | None = None, **evidence: object) -> ExitStatus:
    return ExitStatus(Outcome.CRASHED, reason, None, signal, evidence)


@pytest.mark.parametrize(
    "exit_status",
    [
        ended(signal="SIGKILL"),
        ended(signal="SIGTERM"),
        ended(signal="SIGBUS"),
        ended(message="[Errno 28] No space left on device"),
        ended("RuntimeError", message="EADDRINUSE: address already in use"),
        ended(message="CUDA error: uncorrectable ECC error encountered"),
        ended(message="[Errno 104] Connection reset by peer"),
        ended("it ended with code 1", disk_is_full=True),
        ended("its runner failed: [Errno 5]", runner_failed=True),
        ended(message="NCCL error in: x.cpp:12, unhandled system error (run with NCCL_DEBUG=INFO)"),
    ],
)
def test_failures_of_the_infrastructure(exit_status: ExitStatus) -> None:
    assert is_infrastructure(exit_status)


@pytest.mark.parametrize(
    "exit_status",
    [
        ended(message="shapes do not match"),
        ended(signal="SIGSEGV"),
        ended(signal="SIGABRT"),
        ended(message="CUDA error: device-side assert triggered"),
        ended("it ended with code 1"),
        ended("rank 1 met: no space left on device"),  # the reason is not searched
        ExitStatus(Outcome.GPU_OOM, "no space left on device"),
        ExitStatus(Outcome.TIMEOUT, "no progress for 300 s", None, "SIGKILL"),
        ExitStatus(Outcome.OK, ""),
    ],
)
def test_failures_of_the_trial(exit_status: ExitStatus) -> None:
    assert not is_infrastructure(exit_status)


def test_nan_and_infinity_are_omitted(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON cannot represent them, and they must not stop a study."""
    from stepscope.studies import measure as module

    values = module._values
    monkeypatch.setattr(
        module,
        "_values",
        lambda *arguments: {
            **values(*arguments),
            "cpu_share": float("nan"),
            "step_seconds": float("inf"),
        },
    )
    (folder,) = (steps.parent.parent for steps in done.glob("*/r1a1/trial/steps0.bin"))
    blank = Result(folder.parent.name, {}, "trial", 1, 1, 1, Outcome.LOST)
    result = measure_trial(folder, blank).result
    assert result.throughput and not {"cpu_share", "step_seconds"} & result.values.keys()
