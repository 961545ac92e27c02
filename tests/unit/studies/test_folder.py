"""The folder of a study stays true, whatever is torn, deleted or damaged in it."""

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

from stepscope.errors import CannotTry, StudyBusy
from stepscope.records import Outcome
from stepscope.records.codec import dumps, to_json
from stepscope.records.trial import InterferenceReason
from stepscope.runs.facts import identity_of_self
from stepscope.studies import folder as module
from stepscope.studies.folder import (
    Ledger,
    StudyPaths,
    alone,
    claim,
    runner_of,
)
from stepscope.studies.results import Attempt, Result
from stepscope.studies.scan import StudyScan, look

KEY, OTHER = "0123456789ab", "ba9876543210"
SETTINGS = {"model": "cnn", "batch_size": 32}
DEAD = {**to_json(identity_of_self()), "pid": 2**22 + 1}


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    folder = tmp_path / "study"
    folder.mkdir()
    return StudyPaths(folder)


def attempt(number: int = 1, key: str = KEY, repeat: int = 1) -> Attempt:
    return Attempt(key, "trial", repeat, number)


def claimed(paths: StudyPaths, it: Attempt, by: dict[str, Any] | None = None) -> Attempt:
    assert claim(paths, it, SETTINGS)
    paths.claim(it.place).write_text(json.dumps(DEAD if by is None else by))
    return it


def ran(paths: StudyPaths, it: Attempt, outcome: str = "ok", watcher: Any = None) -> Attempt:
    """An attempt that left a run folder, of which the ledger does not know."""
    folder = paths.run(claimed(paths, it).place)
    folder.mkdir()
    facts = {
        "format": 1,
        "clock": {"monotonic_ns": 0, "wall_ns": 10**18 + it.number},
        "watcher": watcher or DEAD,
        "ending": {"outcome": outcome},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return it


def measured(folder: Path, blank: Result) -> Result:
    """As much as there is in the folders of these tests."""
    facts = json.loads((folder / "run.json").read_text())
    return replace(
        blank,
        outcome=Outcome(facts["ending"]["outcome"]),
        reason="",
        began=facts["clock"]["wall_ns"] / 1e9,
        values={"samples_per_second": 100.0 + blank.attempt},
    )


def looked(paths: StudyPaths) -> StudyScan:
    found = look(paths, measured)
    assert len({r.place for r in found.results}) == len(found.results), "a result counts twice"
    return found


def outcomes(found: StudyScan) -> dict[str, str]:
    return {result.place: result.outcome.value for result in found.results}


def test_a_new_study_has_nothing(paths: StudyPaths) -> None:
    assert looked(paths) == StudyScan([], [], set(), [], [])


def test_what_is_no_trial_is_not_looked_at(paths: StudyPaths) -> None:
    for name in ("derived", "ledger", "notes", "0123456789AB", "0123456789ab0"):
        (paths.folder / name / "r1a1").mkdir(parents=True)
    (paths.folder / OTHER).write_text("a file")
    (paths.folder / KEY).mkdir()
    for name in ("spec.json", ".r1a1.claim.7.tmp", "r1", "xr1a1", "r1a1.claim.bak"):
        (paths.folder / KEY / name).write_text("{}")
    assert looked(paths) == StudyScan([], [], set(), [], [])


def test_a_claim_is_made_once(paths: StudyPaths) -> None:
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


def test_of_many_one_gets_a_claim(paths: StudyPaths) -> None:
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
    assert looked(paths).running == [attempt()]


def test_who_claimed_and_died_lost_it_and_who_lives_runs_it(paths: StudyPaths) -> None:
    claimed(paths, attempt(1))
    claimed(paths, attempt(2), to_json(identity_of_self()))
    ran(paths, attempt(3), "running")
    ran(paths, attempt(4), "running", to_json(identity_of_self()))
    found = looked(paths)
    assert outcomes(found) == {f"{KEY}/r1a1": "lost", f"{KEY}/r1a3": "lost"}
    assert found.running == [attempt(2), attempt(4)]
    assert found.attempts == {attempt(number) for number in (1, 2, 3, 4)}
    assert all(dict(result.settings) == SETTINGS for result in found.results)
    assert found.remarks == []


CLAIMS = [b"", b"{", b"\xff\x00", b"[1]", b"null", json.dumps({**DEAD, "pid": "x"}).encode()]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_that_says_nothing_is_of_nobody(paths: StudyPaths, claim: bytes) -> None:
    paths.claim(claimed(paths, attempt()).place).write_bytes(claim)
    assert outcomes(looked(paths)) == {f"{KEY}/r1a1": "lost"}


def ledger_of(paths: StudyPaths, found: StudyScan) -> Path:
    ledger = Ledger(paths)
    for result in found.unwritten:
        ledger.add(result)
    (file,) = paths.ledger.iterdir()
    return file


def test_what_the_ledger_has_is_not_measured_again(paths: StudyPaths) -> None:
    for number in (1, 2):
        ran(paths, attempt(number))
    before = looked(paths)
    assert before.unwritten == before.results
    ledger_of(paths, before)

    def unexpected(folder: Path, blank: Result) -> Result:
        raise AssertionError(folder)

    after = look(paths, unexpected)
    assert (after.results, after.unwritten) == (before.results, [])


def test_a_ledger_that_has_noise_in_words(paths: StudyPaths) -> None:
    ran(paths, attempt())
    file = ledger_of(paths, looked(paths))
    line = {**json.loads(file.read_text()), "noise": ["others used 1.2 of 2 cores"]}
    file.write_text(json.dumps(line) + "\n")
    found = looked(paths)
    (result,) = found.results
    assert result.noise == (InterferenceReason("other", text="others used 1.2 of 2 cores"),)
    assert not found.unwritten and not found.remarks


def test_a_ledger_torn_anywhere_in_its_last_line(paths: StudyPaths) -> None:
    for number in (1, 2, 3):
        ran(paths, attempt(number))
    before = looked(paths)
    file = ledger_of(paths, before)
    whole = file.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(whole)):
        file.write_bytes(whole[:size])
        found = looked(paths)
        assert sorted(outcomes(found)) == sorted(outcomes(before)), size
        assert found.unwritten == before.results[-1:], size
    # Whoever goes on writes into a file of their own, or after the torn line into the same.
    file.write_bytes(whole[: last + 10])
    ledger_of(paths, looked(paths))
    assert sorted(outcomes(looked(paths))) == sorted(outcomes(before))


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"[]\n", b"7\n", b"\xff\xfe\n", b'{"key": 1}\n'])
def test_lines_that_are_no_results_are_made_again(paths: StudyPaths, line: bytes) -> None:
    for number in (1, 2):
        ran(paths, attempt(number))
    before = looked(paths)
    file = ledger_of(paths, before)
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(line + second)
    found = looked(paths)
    assert sorted(outcomes(found)) == sorted(outcomes(before))
    assert [r.place for r in found.unwritten] == [json.loads(first)["key"] + "/r1a1"]
    assert len(found.remarks) == (0 if line == b"\n" else 1)


def test_a_ledger_that_was_deleted_is_made_again(paths: StudyPaths) -> None:
    for number in (1, 2, 3):
        ran(paths, attempt(number), "gpu_oom" if number == 2 else "ok")
    before = looked(paths)
    ledger_of(paths, before)
    shutil.rmtree(paths.ledger)
    again = looked(paths)
    assert again.results == again.unwritten == before.results


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(os.urandom(300)),
    "another type": lambda file: file.write_text("[1, 2]"),
    "no ending": lambda file: file.write_text('{"format": 1, "clock": {}, "watcher": {}}'),
    "of the future": lambda file: file.write_text('{"format": 99}'),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_counts_as_lost_and_is_left_as_it_is(paths: StudyPaths, damage: str) -> None:
    ran(paths, attempt(1, OTHER))
    file = paths.run(ran(paths, attempt()).place) / "run.json"
    (file.parent / "precious").write_text("of the user")
    DAMAGE[damage](file)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in file.parent.iterdir())
    found = looked(paths)
    assert outcomes(found) == {f"{KEY}/r1a1": "lost", f"{OTHER}/r1a1": "ok"}
    assert sorted((p.name, p.stat().st_mtime_ns) for p in file.parent.iterdir()) == before
    told = [] if damage == "missing" else ["counts as lost, and is tried again"]
    assert [text[-len(told[0]) :] for text in found.remarks] == told
    assert all(str(file.parent) in text for text in found.remarks)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("?"), EOFError()])
def test_whatever_reading_a_run_comes_to(paths: StudyPaths, error: Exception) -> None:
    ran(paths, attempt())

    def fail(folder: Path, blank: Result) -> Result:
        raise error

    found = look(paths, fail)
    assert outcomes(found) == {f"{KEY}/r1a1": "lost"} and len(found.remarks) == 1


def test_a_run_folder_that_was_deleted_is_tried_again(paths: StudyPaths) -> None:
    for number in (1, 2):
        ran(paths, attempt(repeat=number))
    ledger_of(paths, looked(paths))
    shutil.rmtree(paths.run(attempt().place))
    found = looked(paths)
    assert outcomes(found) == {f"{KEY}/r2a1": "ok"}
    assert attempt() in found.attempts, "its number is taken"


def test_the_number_of_one_that_was_deleted_with_its_claim_is_not_used_again(
    paths: StudyPaths,
) -> None:
    """Its line would be taken for that of a new one, which may be cut short."""
    ran(paths, attempt())
    ledger_of(paths, looked(paths))
    shutil.rmtree(paths.run(attempt().place).parent)
    found = looked(paths)
    assert not found.results and attempt() in found.attempts


def test_the_later_line_counts_of_a_trial_that_was_deleted_with_its_claim_and_run_again(
    paths: StudyPaths,
) -> None:
    """The files of runners are named after processes: their order says nothing."""
    ran(paths, attempt())
    (old,) = looked(paths).results
    new = replace(old, began=old.began + 100, values={"samples_per_second": 7.0})
    for names in (("a", "b"), ("b", "a")):
        paths.ledger.mkdir()
        for name, result in zip(names, (old, new), strict=True):
            line = dumps(result) + "\n"
            (paths.ledger / f"{name}.jsonl").write_text(line)
        assert looked(paths).results == [new]
        shutil.rmtree(paths.ledger)


def test_a_ledger_that_cannot_be_written_is_said_so(paths: StudyPaths) -> None:
    ran(paths, attempt())
    (result,) = looked(paths).results
    paths.ledger.write_text("in the way")
    with pytest.raises(CannotTry, match="cannot be written"):
        Ledger(paths).add(result)


ALONE = """
import sys, time
from pathlib import Path
from stepscope.studies.folder import StudyPaths, alone
with alone(StudyPaths(Path(sys.argv[1]))):
    print("in", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def somebody(paths: StudyPaths) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ALONE, str(paths.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "in\n"
            yield process
        finally:
            process.kill()


def test_one_runs_a_study_and_the_second_is_told_who(paths: StudyPaths) -> None:
    assert runner_of(paths) is None
    with somebody(paths) as first:
        paths.now.write_text("{}")
        with pytest.raises(StudyBusy, match=f"by process {first.pid} on ") as told, alone(paths):
            pass
        assert "study show" in told.value.hint
        assert runner_of(paths).pid == first.pid
        assert paths.now.exists(), "it is of who runs the study"
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert runner_of(paths) is None
    with alone(paths):
        assert runner_of(paths).pid == os.getpid()
    assert runner_of(paths) is None and not paths.now.exists()


def test_who_only_looks_keeps_nobody_from_running_it(
    paths: StudyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.trials.state._ATTEMPTS", 1000)
    with alone(paths):
        pass
    looking = os.open(paths.lock, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    pid = os.fork()
    if not pid:
        time.sleep(0.15)
        os._exit(0)
    os.close(looking)  # our child has it for a moment longer
    with alone(paths):
        assert runner_of(paths).pid == os.getpid()
    os.waitpid(pid, 0)


@pytest.mark.parametrize("place", ["file/study", "file"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotTry, match="cannot be written"), alone(StudyPaths(tmp_path / place)):
        pass
