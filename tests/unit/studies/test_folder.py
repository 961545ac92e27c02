"""The folder of a study stays consistent when files are torn, deleted or damaged."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import StudyBusy, TrialError
from stepscope.records import Outcome
from stepscope.records.codec import dumps, to_json
from stepscope.records.trial import InterferenceReason
from stepscope.runs.facts import identity_of_self
from stepscope.studies import folder as module
from stepscope.studies.folder import (
    Ledger,
    StudyPaths,
    claim,
    exclusive_run,
    runner_of,
)
from stepscope.studies.results import Attempt, Result
from stepscope.studies.scan import StudyScan, scan_folder

KEY, OTHER = "0123456789ab", "ba9876543210"
SETTINGS = {"model": "cnn", "batch_size": 32}
EXITED = {**to_json(identity_of_self()), "pid": 2**22 + 1}


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    folder = tmp_path / "study"
    folder.mkdir()
    return StudyPaths(folder)


def attempt(number: int = 1, key: str = KEY, repeat: int = 1) -> Attempt:
    return Attempt(key, "trial", repeat, number)


def claimed(paths: StudyPaths, attempt: Attempt, by: dict[str, Any] | None = None) -> Attempt:
    assert claim(paths, attempt, SETTINGS)
    paths.claim(attempt.place).write_text(json.dumps(EXITED if by is None else by))
    return attempt


def ran(paths: StudyPaths, attempt: Attempt, outcome: str = "ok", monitor: Any = None) -> Attempt:
    """Write the run folder of an attempt that the ledger misses."""
    folder = paths.run(claimed(paths, attempt).place)
    folder.mkdir()
    facts = {
        "format": 1,
        "clock": {"monotonic_ns": 0, "wall_ns": 10**18 + attempt.number},
        "monitor": monitor or EXITED,
        "exit_status": {"outcome": outcome},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return attempt


def measured(folder: Path, blank: Result) -> Result:
    """Read the values that the folders of these tests contain."""
    facts = json.loads((folder / "run.json").read_text())
    return replace(
        blank,
        outcome=Outcome(facts["exit_status"]["outcome"]),
        reason="",
        started=facts["clock"]["wall_ns"] / 1e9,
        values={"samples_per_second": 100.0 + blank.attempt},
    )


def scanned(paths: StudyPaths) -> StudyScan:
    scan = scan_folder(paths, measured)
    assert len({r.place for r in scan.results}) == len(scan.results), "a result counts twice"
    return scan


def outcomes(scan: StudyScan) -> dict[str, str]:
    return {result.place: result.outcome.value for result in scan.results}


def test_a_new_study_is_empty(paths: StudyPaths) -> None:
    assert scanned(paths) == StudyScan([], [], set(), [], [])


def test_other_files_are_ignored(paths: StudyPaths) -> None:
    for name in ("derived", "ledger", "notes", "0123456789AB", "0123456789ab0"):
        (paths.folder / name / "r1a1").mkdir(parents=True)
    (paths.folder / OTHER).write_text("a file")
    (paths.folder / KEY).mkdir()
    for name in ("spec.json", ".r1a1.claim.7.tmp", "r1", "xr1a1", "r1a1.claim.bak"):
        (paths.folder / KEY / name).write_text("{}")
    assert scanned(paths) == StudyScan([], [], set(), [], [])


def test_an_attempt_is_claimed_once(paths: StudyPaths) -> None:
    assert claim(paths, attempt(), SETTINGS)
    assert not claim(paths, attempt(), SETTINGS)
    assert claim(paths, attempt(2), SETTINGS)
    assert json.loads(paths.claim(attempt().place).read_text())["pid"] == os.getpid()
    assert json.loads(paths.spec(KEY).read_text())["settings"] == SETTINGS
    assert {p.name for p in (paths.folder / KEY).iterdir()} == {
        "spec.json",
        "r1a1.claim",
        "r1a2.claim",
    }


def test_only_one_of_many_processes_gets_a_claim(paths: StudyPaths) -> None:
    fork = multiprocessing.get_context("fork")
    start, won = fork.Event(), fork.SimpleQueue()

    def claim_all() -> None:
        start.wait()
        won.put([number for number in range(1, 41) if claim(paths, attempt(number), SETTINGS)])

    claimers = [fork.Process(target=claim_all) for _ in range(6)]
    for each in claimers:
        each.start()
    start.set()
    got = Counter(number for _ in claimers for number in won.get())
    for each in claimers:
        each.join()
    assert got == Counter(range(1, 41))


def test_a_file_system_without_links(paths: StudyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "link", refuse)
    assert claim(paths, attempt(), SETTINGS)
    assert not claim(paths, attempt(), SETTINGS)
    assert scanned(paths).running == [attempt()]


def test_a_claim_is_lost_if_its_process_has_exited(paths: StudyPaths) -> None:
    claimed(paths, attempt(1))
    claimed(paths, attempt(2), to_json(identity_of_self()))
    ran(paths, attempt(3), "running")
    ran(paths, attempt(4), "running", to_json(identity_of_self()))
    scan = scanned(paths)
    assert outcomes(scan) == {f"{KEY}/r1a1": "lost", f"{KEY}/r1a3": "lost"}
    assert {result.reason for result in scan.results} == {
        "the runner was killed or the machine went down before the trial finished"
    }
    assert scan.running == [attempt(2), attempt(4)]
    assert scan.attempts == {attempt(number) for number in (1, 2, 3, 4)}
    assert all(dict(result.settings) == SETTINGS for result in scan.results)
    assert scan.remarks == []


CLAIMS = [b"", b"{", b"\xff\x00", b"[1]", b"null", json.dumps({**EXITED, "pid": "x"}).encode()]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_damaged_claim_is_lost(paths: StudyPaths, claim: bytes) -> None:
    paths.claim(claimed(paths, attempt()).place).write_bytes(claim)
    assert outcomes(scanned(paths)) == {f"{KEY}/r1a1": "lost"}


def write_ledger(paths: StudyPaths, scan: StudyScan) -> Path:
    ledger = Ledger(paths)
    for result in scan.unwritten:
        ledger.add(result)
    (file,) = paths.ledger.iterdir()
    return file


def test_results_in_the_ledger_are_not_measured_again(paths: StudyPaths) -> None:
    for number in (1, 2):
        ran(paths, attempt(number))
    before = scanned(paths)
    assert before.unwritten == before.results
    write_ledger(paths, before)

    def unexpected(folder: Path, blank: Result) -> Result:
        raise AssertionError(folder)

    after = scan_folder(paths, unexpected)
    assert (after.results, after.unwritten) == (before.results, [])


def test_interference_is_read_from_the_ledger(paths: StudyPaths) -> None:
    ran(paths, attempt())
    file = write_ledger(paths, scanned(paths))
    reason = {"kind": "cpu", "value": 1.2, "cores": 2.0}
    line = {**json.loads(file.read_text()), "interference": [reason]}
    file.write_text(json.dumps(line) + "\n")
    scan = scanned(paths)
    (result,) = scan.results
    assert result.interference == (InterferenceReason("cpu", 1.2, 2.0),)
    assert not scan.unwritten and not scan.remarks


def test_a_last_line_that_is_torn_anywhere(paths: StudyPaths) -> None:
    for number in (1, 2, 3):
        ran(paths, attempt(number))
    before = scanned(paths)
    file = write_ledger(paths, before)
    whole = file.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(whole)):
        file.write_bytes(whole[:size])
        scan = scanned(paths)
        assert sorted(outcomes(scan)) == sorted(outcomes(before)), size
        assert scan.unwritten == before.results[-1:], size
    # A new runner writes to its own file; the same process appends to the torn line.
    file.write_bytes(whole[: last + 10])
    write_ledger(paths, scanned(paths))
    assert sorted(outcomes(scanned(paths))) == sorted(outcomes(before))


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"[]\n",
        b"7\n",
        b"\xff\xfe\n",
        b'{"key": 1}\n',
        b'{"key": "0123456789ab", "interference": ["text"]}\n',
    ],
)
def test_invalid_lines_are_restored_from_run_folders(paths: StudyPaths, line: bytes) -> None:
    for number in (1, 2):
        ran(paths, attempt(number))
    before = scanned(paths)
    file = write_ledger(paths, before)
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(line + second)
    scan = scanned(paths)
    assert sorted(outcomes(scan)) == sorted(outcomes(before))
    assert [r.place for r in scan.unwritten] == [json.loads(first)["key"] + "/r1a1"]
    remark = (
        "1 line of the list of results (ledger/*.jsonl) cannot be read: the run folders are read "
        "instead"
    )
    assert scan.remarks == ([] if line == b"\n" else [remark])


def test_a_deleted_ledger_is_restored(paths: StudyPaths) -> None:
    for number in (1, 2, 3):
        ran(paths, attempt(number), "gpu_oom" if number == 2 else "ok")
    before = scanned(paths)
    write_ledger(paths, before)
    shutil.rmtree(paths.ledger)
    again = scanned(paths)
    assert again.results == again.unwritten == before.results


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(os.urandom(300)),
    "another type": lambda file: file.write_text("[1, 2]"),
    "no exit status": lambda file: file.write_text('{"format": 1, "clock": {}, "monitor": {}}'),
    "newer format": lambda file: file.write_text('{"format": 99}'),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_lost_and_left_unchanged(paths: StudyPaths, damage: str) -> None:
    ran(paths, attempt(1, OTHER))
    file = paths.run(ran(paths, attempt()).place) / "run.json"
    (file.parent / "precious").write_text("of the user")
    DAMAGE[damage](file)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in file.parent.iterdir())
    scan = scanned(paths)
    assert outcomes(scan) == {f"{KEY}/r1a1": "lost", f"{OTHER}/r1a1": "ok"}
    assert sorted((p.name, p.stat().st_mtime_ns) for p in file.parent.iterdir()) == before
    assert len(scan.remarks) == (0 if damage == "missing" else 1)
    for remark in scan.remarks:
        assert str(file.parent) in remark
        assert remark.endswith(": the trial counts as lost and is retried")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("?"), EOFError()])
def test_errors_while_reading_a_run(paths: StudyPaths, error: Exception) -> None:
    ran(paths, attempt())

    def fail(folder: Path, blank: Result) -> Result:
        raise error

    scan = scan_folder(paths, fail)
    assert outcomes(scan) == {f"{KEY}/r1a1": "lost"} and len(scan.remarks) == 1


def test_a_trial_whose_run_folder_was_deleted_is_retried(paths: StudyPaths) -> None:
    for number in (1, 2):
        ran(paths, attempt(repeat=number))
    write_ledger(paths, scanned(paths))
    shutil.rmtree(paths.run(attempt().place))
    scan = scanned(paths)
    assert outcomes(scan) == {f"{KEY}/r2a1": "ok"}
    assert attempt() in scan.attempts, "its number stays reserved"


def test_the_number_of_an_attempt_deleted_with_its_claim_is_not_reused(paths: StudyPaths) -> None:
    """Its ledger line would be taken for the line of a new attempt."""
    ran(paths, attempt())
    write_ledger(paths, scanned(paths))
    shutil.rmtree(paths.run(attempt().place).parent)
    scan = scanned(paths)
    assert not scan.results and attempt() in scan.attempts


def test_the_later_of_two_lines_counts(paths: StudyPaths) -> None:
    """The ledger files are named after processes, so that their order has no meaning."""
    ran(paths, attempt())
    (old,) = scanned(paths).results
    new = replace(old, started=old.started + 100, values={"samples_per_second": 7.0})
    for names in (("a", "b"), ("b", "a")):
        paths.ledger.mkdir()
        for name, result in zip(names, (old, new), strict=True):
            line = dumps(result) + "\n"
            (paths.ledger / f"{name}.jsonl").write_text(line)
        assert scanned(paths).results == [new]
        shutil.rmtree(paths.ledger)


def test_a_ledger_that_cannot_be_written_is_an_error(paths: StudyPaths) -> None:
    ran(paths, attempt())
    (result,) = scanned(paths).results
    paths.ledger.write_text("in the way")
    with pytest.raises(TrialError, match="Cannot write the list of results"):
        Ledger(paths).add(result)


EXCLUSIVE_RUN = """
import sys, time
from pathlib import Path
from stepscope.studies.folder import StudyPaths, exclusive_run
with exclusive_run(StudyPaths(Path(sys.argv[1]))):
    print("in", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def other_runner(paths: StudyPaths) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", EXCLUSIVE_RUN, str(paths.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "in\n"
            yield process
        finally:
            process.kill()


def test_a_second_process_cannot_run_the_study(paths: StudyPaths) -> None:
    assert runner_of(paths) is None
    with other_runner(paths) as first:
        paths.now.write_text("{}")
        with (
            pytest.raises(StudyBusy, match=rf"already running \(PID {first.pid} on ") as error,
            exclusive_run(paths),
        ):
            pass
        assert "study show" in error.value.hint
        assert runner_of(paths).pid == first.pid
        assert paths.now.exists(), "it belongs to the running process"
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert runner_of(paths) is None
    with exclusive_run(paths):
        assert runner_of(paths).pid == os.getpid()
    assert runner_of(paths) is None and not paths.now.exists()


def test_reading_the_lock_does_not_block_a_run(
    paths: StudyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.trials.locks._ATTEMPTS", 1000)
    with exclusive_run(paths):
        pass
    reader = os.open(paths.lock, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    pid = os.fork()
    if not pid:
        time.sleep(0.15)
        os._exit(0)
    os.close(reader)  # the child keeps it for a moment
    with exclusive_run(paths):
        assert runner_of(paths).pid == os.getpid()
    os.waitpid(pid, 0)


@pytest.mark.parametrize("place", ["file/study", "file"])
def test_a_folder_that_cannot_be_created(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    paths = StudyPaths(tmp_path / place)
    with pytest.raises(TrialError, match="Cannot write the study"), exclusive_run(paths):
        pass
