"""From the run folder of a trial to its line: real run folders, of trials that trained nothing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.records import Ending, Outcome
from stepscope.studies.folder import StudyPaths
from stepscope.studies.measure import is_infrastructure, measure_trial
from stepscope.studies.results import Result
from stepscope.studies.scan import StudyScan, look
from studies import design, planted_environment, study

DESIGN = "factors: {batch_size: [16, 64]}\nblocks: {reruns: 0, sentinel: none}\n"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "garbage": lambda file: file.write_bytes(random.Random(6).randbytes(500)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "json of something else": lambda file: file.write_text("[[1]]"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two trials: one trained, one ran out of memory."""
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


def by_outcome(found: StudyScan) -> dict[Outcome, Result]:
    return {result.outcome: result for result in found.results}


def test_a_trial_that_trained_tells_its_figures(paths: StudyPaths) -> None:
    told = by_outcome(look(paths, measured))[Outcome.OK]
    assert told.throughput == pytest.approx(160.0, rel=1e-6)
    assert told.values["step_seconds"] == pytest.approx(0.1, rel=1e-6)
    assert told.values["gpu_memory_peak"] == 1e9
    assert told.low is not None and told.high is not None and told.low < 160 < told.high
    assert 0 < told.seconds < 30 and told.began > 1.6e9
    assert (told.role, told.repeat, told.attempt, told.block) == ("trial", 1, 1, 1)
    assert told.settings["batch_size"] == 16 and told.reason == ""


def test_an_oom_is_a_result(paths: StudyPaths) -> None:
    told = by_outcome(look(paths, measured))[Outcome.GPU_OOM]
    assert told.is_result and told.throughput is None and "memory" in told.reason
    assert told.settings["batch_size"] == 64


def test_the_ledger_can_be_made_again_from_run_folders(paths: StudyPaths) -> None:
    def refuse(folder: Path, blank: Result) -> Result:
        raise AssertionError("the ledger has it")

    before = look(paths, refuse).results
    shutil.rmtree(paths.ledger)
    for folder in paths.folder.glob("*/r*a*"):
        shutil.rmtree(folder / "derived", ignore_errors=True)
    again = look(paths, measured)
    assert sorted(again.results, key=lambda r: r.key) == sorted(before, key=lambda r: r.key)
    assert again.unwritten == again.results


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_file_of_a_run_is_damaged_the_study_can_be_read(
    done: Path, tmp_path: Path, damage: str
) -> None:
    names = [path.relative_to(done) for path in sorted(done.glob("*/r1a1/**/*")) if path.is_file()]
    assert {"run.json", "rank0.json"} <= {name.name for name in names}
    for number, name in enumerate(names):
        paths = StudyPaths(tmp_path / str(number))
        shutil.copytree(done, paths.folder, ignore=shutil.ignore_patterns("ledger", "derived"))
        DAMAGE[damage](paths.folder / name)
        found = look(paths, measured)
        assert len(found.results) == 2, name
        lost = [result for result in found.results if result.outcome is Outcome.LOST]
        assert all(result.key == name.parts[0] for result in lost), "the other one counts"
        assert len(found.remarks) <= len(lost)
        if name.name == "run.json":
            assert lost
        elif lost:
            assert found.remarks, name


def ended(reason: str = "", signal: str | None = None, **evidence: object) -> Ending:
    return Ending(Outcome.CRASHED, reason, None, signal, evidence)


@pytest.mark.parametrize(
    "ending",
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
def test_what_fails_around_a_trial(ending: Ending) -> None:
    assert is_infrastructure(ending)


@pytest.mark.parametrize(
    "ending",
    [
        ended(message="shapes do not match"),
        ended(signal="SIGSEGV"),
        ended(signal="SIGABRT"),
        ended(message="CUDA error: device-side assert triggered"),
        ended("it ended with code 1"),
        ended("rank 1 met: no space left on device"),  # our own words are not searched
        Ending(Outcome.GPU_OOM, "no space left on device"),
        Ending(Outcome.TIMEOUT, "nothing was heard of it", None, "SIGKILL"),
        Ending(Outcome.OK, ""),
    ],
)
def test_what_is_the_trials_own(ending: Ending) -> None:
    assert not is_infrastructure(ending)


def test_a_number_that_is_none_is_left_out(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has none of them, and a study must not stop for one."""
    from stepscope.studies import measure as module

    values = module._values
    monkeypatch.setattr(
        module,
        "_values",
        lambda *told: {**values(*told), "cpu_share": float("nan"), "step_seconds": float("inf")},
    )
    (folder,) = (steps.parent.parent for steps in done.glob("*/r1a1/trial/steps0.bin"))
    blank = Result(folder.parent.name, {}, "trial", 1, 1, 1, Outcome.LOST)
    told = measure_trial(folder, blank).result
    assert told.throughput and not {"cpu_share", "step_seconds"} & told.values.keys()
