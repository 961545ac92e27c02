"""The view of a trial: what is shown, what caused its end, and what to do next."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import RunFolderError
from stepscope.records import Outcome
from stepscope.report.trial.json import KEYS, trial_dict, trials_dict
from stepscope.report.trial.view import TrialView, advice_of, mean_of, trial_view
from stepscope.runs.reader import open_run
from stepscope.workloads.spec import Workload
from synthetic import write_run
from synthetic_trials import CNN, Trial, even_steps, write_lost_trial, write_repeats, write_trial

SHORT = Trial(steps=even_steps(30))


def ended(outcome: str, reason: str = "it did", **evidence: Any) -> dict[str, Any]:
    return {"outcome": outcome, "reason": reason, "exit_code": 1, "evidence": evidence}


def view_of(folder: Path, trial: Trial) -> TrialView:
    return trial_view(write_trial(folder / "run", trial).folder)


def failing(
    kind: str = "error", message: str = "It broke", hint: str = "", where: str | None = None
) -> Any:
    error = {"kind": kind, "type": "RuntimeError", "message": message, "hint": hint}
    error |= {"where": where} if where else {}
    return lambda rank: {"error": error, "done": False}


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> TrialView:
    return trial_view(write_trial(tmp_path_factory.mktemp("runs") / "run").folder)


def test_a_trial_that_went_well(view: TrialView) -> None:
    assert (view.name, view.outcome, view.tone, view.is_ok) == ("cnn", "ok", "good", True)
    assert view.samples_per_second == pytest.approx(32 / 0.05, rel=0.01)
    assert view.workload["pin"] is False and view.workload["classes"] == 10, "as resolved"
    assert (view.record.samples_per_step, view.warmup_steps, view.cause) == (32, 1, ())
    assert view.measured.host_memory_peak and view.measured.overhead.total
    expected = "For about ± 7.6 %:\nstepscope trial cnn --workers 2 --repeat 5"
    assert view.advice == expected


def test_a_run_or_its_folder(tmp_path: Path) -> None:
    folder = write_trial(tmp_path / "run", SHORT).folder
    assert trial_view(folder) == trial_view(str(folder)) == trial_view(open_run(folder))


def test_another_run_is_no_trial(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a trial"):
        trial_view(write_run(tmp_path / "run").folder)


@pytest.mark.parametrize(
    ("knobs", "advice"),
    [
        ({}, "--seconds 1"),
        ({"steps": 6}, "--steps 24"),
        ({"steps": 2}, "--steps 16"),
        ({"epochs": 1}, "--epochs 6"),
        ({"epochs": 2}, "--epochs 8"),
        ({"seconds": 7.5}, "--seconds 30"),
    ],
)
def test_too_short_to_judge(tmp_path: Path, knobs: dict[str, Any], advice: str) -> None:
    short = Trial(replace(CNN, **knobs), even_steps(5), steps_per_epoch=3)
    view = view_of(tmp_path, short)
    assert not view.measured.steady.steady
    assert view.advice.startswith("To judge it, let it take longer:\nstepscope trial cnn")
    assert view.advice.endswith(advice)


def test_steps_that_differ_more_than_processes_do(tmp_path: Path) -> None:
    """More of them help more than more processes."""
    wild = view_of(tmp_path, replace(SHORT, steps=even_steps(30, noise=0.9)))
    assert wild.measured.steady.steady
    assert wild.advice.startswith("To be surer, let it take longer")


def test_an_option_that_was_given_is_set_anew(tmp_path: Path) -> None:
    command = ["stepscope", "trial", "my net.py:f", "--steps", "6", "--lr", "0.1"]
    short = Trial(replace(CNN, steps=6), even_steps(5), facts={"command": command})
    again = "stepscope trial 'my net.py:f' --lr 0.1 --steps 24"
    assert view_of(tmp_path, short).advice.endswith(again)


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ("cnn --json --steps 2", "cnn --steps 16"),
        ("-q --quiet cnn --out a --out=b --steps=2", "cnn --out=b --steps 16"),
        ("--profile cnn --pin --no-pin --compile", "--profile cnn --no-pin --compile --steps 16"),
    ],
)
def test_a_suggested_command_is_for_people(tmp_path: Path, given: str, again: str) -> None:
    command = ["stepscope", "trial", *given.split()]
    short = Trial(replace(CNN, steps=2), even_steps(1), facts={"command": command})
    assert view_of(tmp_path, short).advice.splitlines()[1] == f"stepscope trial {again}"


def test_a_busy_machine(tmp_path: Path) -> None:
    view = view_of(tmp_path, replace(Trial(), cpus=2.0))
    assert view.measured.is_disturbed
    idle = "Try again when the machine is idle:\nstepscope trial cnn --workers 2"
    assert view.advice == advice_of([view, view]) == idle
    plain = trial_dict(view)
    assert plain["disturbed"] is True and 0.25 < plain["others_cores"] < 1


def test_an_unknown_command(tmp_path: Path) -> None:
    view = view_of(tmp_path, replace(SHORT, facts={"command": None}))
    assert view.advice.endswith("the same command --repeat 5")


@pytest.mark.parametrize(
    ("outcome", "limits", "words"),
    [
        ("gpu_oom", {}, ["--batch-size", "--accumulate"]),
        ("gpu_oom", {"gpu_memory": {"asked": 10**9}}, ["--batch-size", "--gpu-memory"]),
        ("host_oom", {"memory": {"asked": 10**9}}, ["--workers", "--prefetch", "--memory"]),
        ("shm_full", {"memory": {"asked": 10**9}}, ["--workers", "/dev/shm"]),
        ("timeout", {}, ["time"]),
        ("interrupted", {}, ["Again:\nstepscope trial cnn --workers 2"]),
        ("crashed", {}, ["Again:\nstepscope trial cnn --workers 2"]),
    ],
)
def test_what_to_do_after_it_failed(
    tmp_path: Path, outcome: str, limits: dict[str, Any], words: list[str]
) -> None:
    view = view_of(tmp_path, replace(SHORT, ending=ended(outcome), limits=limits))
    assert view.ending.outcome is Outcome(outcome) and not view.is_ok
    assert all(word in view.advice for word in words)
    assert ("--gpu-memory" in view.advice) == ("gpu_memory" in limits)


@pytest.mark.parametrize(
    ("workers", "steps", "limited", "advice"),
    [
        (0, 0, True, "Allow more with --memory"),
        (0, 9, True, "Give a smaller --batch-size; or allow more with --memory"),
        (0, 0, False, "Free memory on this machine, or give it less to hold"),
        (
            2,
            0,
            False,
            "Give fewer --workers, a smaller --prefetch or a smaller --batch-size",
        ),
    ],
)
def test_what_would_take_less_memory(
    tmp_path: Path, workers: int, steps: int, limited: bool, advice: str
) -> None:
    limits = {"memory": {"asked": 1 << 30}} if limited else {}
    trial = Trial(
        replace(CNN, workers=workers), even_steps(steps), limits=limits, ending=ended("host_oom")
    )
    paths = write_trial(tmp_path / "run", trial)
    if not steps:
        paths.trial_steps(0).unlink()
    assert trial_view(paths.folder).advice == advice


def test_what_is_there_to_be_read(tmp_path: Path) -> None:
    crashed = write_trial(tmp_path / "a", replace(SHORT, ending=ended("crashed")))
    crashed.stderr_log.write_text("Traceback")
    assert trial_view(crashed.folder).advice == f"All that it said:\n{crashed.stderr_log}"
    native = {**ended("crashed", "killed by SIGSEGV"), "signal": "SIGSEGV"}
    broken = write_trial(tmp_path / "b", replace(SHORT, ending=native))
    broken.stderr_log.write_text("Fatal Python error")
    where = f"Where it crashed is at the end of\n{broken.stderr_log}"
    assert trial_view(broken.folder).advice == where


def test_a_trial_that_hung_and_one_that_was_only_slow(tmp_path: Path) -> None:
    stacks = {"stacks": "trial/stacks.txt", "phase": "training"}
    stood = {**stacks, "limit": "hang", "stood_at": "hang.py:6 in __getitem__ (pt_data_worker)"}
    hung = write_trial(
        tmp_path / "a", replace(SHORT, ending=ended("timeout", "nothing was heard", **stood))
    )
    hung.trial_stacks.touch()
    assert trial_view(hung.folder).advice == "Give it more time, or less to do"
    hung.trial_stacks.write_text("--- pid 1")
    view = trial_view(hung.folder)
    assert view.advice.startswith("A sample, a lock or another rank blocks it;")
    assert view.advice.endswith(f"\n{hung.trial_stacks}") and "--hang" in view.advice
    assert view.cause == ("at step 31, it stood at hang.py:6 in __getitem__ (pt_data_worker)",)
    late = ended("timeout", "it was not done after 9 s", **stacks)
    slow = write_trial(tmp_path / "b", replace(SHORT, ending=late))
    slow.trial_stacks.write_text("--- pid 1")
    assert trial_view(slow.folder).advice.startswith("Give it more time, or less to do.")


def test_the_cause_is_what_a_rank_said(tmp_path: Path) -> None:
    """Not what was printed besides, and no names of counters."""
    ending = ended("gpu_oom", message="It broke", counters={"failcnt": 7}, stderr=["bye"])
    trial = replace(SHORT, ending=ending, rank_facts=failing(hint="Try less", where="v.py:2 in f"))
    view = view_of(tmp_path, trial)
    assert view.cause == ("RuntimeError: It broke (at v.py:2 in f)", "at step 31")
    assert view.advice == "Try less"


KILLS = {
    "cgroup_oom_kills_before": 3,
    "cgroup_oom_kills_after": 3,
    "machine_oom_kills_before": 3,
    "machine_oom_kills_after": 4,
}


@pytest.mark.parametrize(
    ("outcome", "evidence", "words"),
    [
        (
            "host_oom",
            {"oom_kills": 1, "stderr": ["Killed"], "counters": {"memory.failcnt": 7}},
            ["peak 0.98 GiB of 1 GiB, page cache included"],
        ),
        (
            "host_oom",
            {"limit": 1, "pss": 2, "rss": 3, "largest": {"7": 900 << 20, "8": 1}},
            [
                "peak 0.98 GiB of 1 GiB, page cache included, "
                "the largest of its processes held 900 MiB"
            ],
        ),
        ("crashed", KILLS, ["the machine counted 1 OOM kill meanwhile"]),
        ("crashed", {"message": "what it said", "stderr": ["bye"]}, ["what it said", "bye"]),
        ("timeout", {"phase": "importing the framework", "stderr": ["bye"]}, []),
    ],
)
def test_evidence_in_words(
    tmp_path: Path, outcome: str, evidence: dict[str, Any], words: list[str]
) -> None:
    limits = {"memory": {"asked": 1 << 30, "peak": int(0.98 * (1 << 30)), "by": "cgroup v1"}}
    trial = replace(SHORT, ending=ended(outcome, **evidence), limits=limits)
    said = words[:1] if "message" in evidence else []
    rest = words[len(said) :]
    assert view_of(tmp_path, trial).cause == (*said, "at step 31", *rest)


@pytest.mark.parametrize(
    ("evidence", "told", "where"),
    [
        ({"phase": "importing the framework", "steps": 0}, {}, "while importing the framework"),
        ({}, {"phase": "data"}, "while preparing data"),
        ({"phase": "training", "steps": 27}, {}, "at step 27"),
    ],
)
def test_how_far_it_had_come(
    tmp_path: Path, evidence: dict[str, Any], told: dict[str, Any], where: str
) -> None:
    trial = replace(SHORT, ending=ended("timeout", **evidence), rank_facts=lambda rank: told)
    paths = write_trial(tmp_path / "run", trial)
    paths.trial_steps(0).unlink()
    assert trial_view(paths.folder).cause == (where,)


def test_what_was_printed_is_shown_without_noise(tmp_path: Path) -> None:
    def cause(*lines: str) -> tuple[str, ...]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return view_of(folder, replace(SHORT, ending=ended("crashed", stderr=lines))).cause[1:]

    numbered = [f"line {number}" for number in range(9)]
    assert cause(*numbered) == tuple(numbered[-5:])
    warned = ["/x/y.py:12: UserWarning: old", "  warnings.warn(old)"]
    assert cause(*warned, "  File x", "    f(y)", "    ^~~^") == ("  File x", "    f(y)")
    fatal = ["Fatal Python error: Segmentation fault", *numbered]
    assert cause("before", *fatal) == tuple(fatal[:5])


def test_ranks_that_fail_are_named(tmp_path: Path) -> None:
    trial = Trial(
        Workload("cnn", ranks=2), even_steps(9), ending=ended("crashed"), rank_facts=failing()
    )
    said = ("rank 0: RuntimeError: It broke", "rank 1: RuntimeError: It broke")
    assert view_of(tmp_path, trial).cause == (*said, "at step 10")


def test_what_the_reason_says_is_not_said_again(tmp_path: Path) -> None:
    ending = ended("crashed", "RuntimeError: It broke", message="It broke", stderr=["bye"])
    trial = replace(SHORT, ending=ending, rank_facts=failing())
    assert view_of(tmp_path / "a", trial).cause == ("at step 31",)
    placed = replace(trial, rank_facts=failing(where="v.py:2 in f"))
    assert view_of(tmp_path / "b", placed).cause == ("at v.py:2 in f", "at step 31")
    closed = failing(where="v.py:2 in f")(0) | {"phase": "closing"}
    after = replace(trial, rank_facts=lambda rank: closed)
    assert view_of(tmp_path / "d", after).cause == ("at v.py:2 in f", "at step 31")
    ours = replace(
        trial, ending=ended("crashed", "No data"), rank_facts=failing("workload", "No data")
    )
    assert view_of(tmp_path / "c", ours).cause == ("at step 31",)


def test_a_killed_runner_leaves_a_trial_that_can_be_shown(tmp_path: Path) -> None:
    paths = write_lost_trial(tmp_path / "run", replace(SHORT, facts={"cleaned_ns": None}))
    paths.trial_rank(0).unlink()
    view = trial_view(paths.folder)
    assert view.ending.outcome is Outcome.LOST
    assert view.samples_per_second is not None, "its steps are there"
    assert view.measured.overhead.total is None
    assert view.advice == "Again:\nstepscope trial cnn --workers 2"


def test_a_trial_that_runs_needs_no_advice(tmp_path: Path) -> None:
    view = view_of(tmp_path, replace(SHORT, ending={"outcome": "running", "reason": ""}))
    assert (view.outcome, view.advice) == ("running", "")


def test_repeats_have_a_mean(tmp_path: Path) -> None:
    views = [trial_view(f) for f in write_repeats(tmp_path, SHORT, [1, 1.1, 0.95, 1.02, 0.99])]
    mean = mean_of(views)
    assert mean is not None
    rates = [view.samples_per_second or 0 for view in views]
    assert mean.mean == pytest.approx(sum(rates) / 5)
    assert mean.interval.low < mean.mean < mean.interval.high
    assert mean.noise.source == "learnt" and 0.04 < mean.noise.cv < 0.07
    assert mean_of(views[:1]) is None
    assert all(view.advice == "" for view in views)


def test_only_repeats_that_went_well_are_in_the_mean(tmp_path: Path) -> None:
    good = [trial_view(f) for f in write_repeats(tmp_path / "a", SHORT, [1, 1.1])]
    bad = view_of(tmp_path / "b", replace(SHORT, ending=ended("crashed")))
    assert mean_of([*good, bad]) == mean_of(good)
    assert mean_of([good[0], bad]) is None


def test_every_key_is_there_and_is_json(view: TrialView, tmp_path: Path) -> None:
    plain = trial_dict(view)
    assert list(plain) == ["format", *(key for key, _, _ in KEYS)]
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["samples_per_second"] == view.samples_per_second
    assert plain["samples_per_second_low"] < plain["samples_per_second"]
    assert plain["step_seconds"] == pytest.approx(0.05, rel=0.02)
    assert plain["data_wait_share"] == pytest.approx(0.2, rel=0.01)
    assert (plain["outcome"], plain["between_source"], plain["repeat"]) == ("ok", "assumed", 1)
    unknown = {key for key, value in plain.items() if value is None}
    assert unknown == {
        "signal",
        "imbalance",
        "profile_seconds",
        "device_memory_peak_bytes",
        "allocated_peak_bytes",
        "reserved_peak_bytes",
        "allocator_retries",
        "joules",
        "samples_per_joule",
    }
    gpu = trial_dict(view_of(tmp_path, Trial(CNN, even_steps(60), gpus=1)))
    assert gpu["allocated_peak_bytes"] == 2.1e9 and gpu["device_memory_peak_bytes"] > 2.6e9
    assert gpu["joules"] > 0 and gpu["samples_per_joule"] > 0


def test_nothing_known_is_null(tmp_path: Path) -> None:
    paths = write_trial(tmp_path / "run", Trial(CNN, [], ending=ended("crashed"), spread=None))
    paths.trial_rank(0).unlink()
    paths.trial_steps(0).unlink()
    plain = trial_dict(trial_view(paths.folder))
    assert json.dumps(plain, allow_nan=False)
    assert plain["samples_per_second"] is plain["step_seconds"] is plain["confidence"] is None
    assert (plain["steps"], plain["warmup_steps"], plain["why_no_rate"]) == (
        0,
        0,
        "no step was taken",
    )


def test_repeats_for_programs(tmp_path: Path) -> None:
    views = [trial_view(f) for f in write_repeats(tmp_path, SHORT, [1, 1.1, 0.95])]
    plain = trials_dict(views)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert [trial["repeat"] for trial in plain["trials"]] == [1, 2, 3] and plain["ok"] == 3
    assert plain["samples_per_second_low"] < plain["samples_per_second"]
    assert trials_dict(views[:1]) == trial_dict(views[0])


def test_keys_are_named_and_explained_once() -> None:
    keys = [key for key, _, _ in KEYS]
    assert len(set(keys)) == len(keys)
    assert all(meaning for key, _, meaning in KEYS if not key.endswith("_p95"))
