"""The view of a trial: measurements, failure details and recommendation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import RunFolderError
from stepscope.records import Outcome
from stepscope.report.trial.json import KEYS, trial_dict, trials_dict
from stepscope.report.trial.view import TrialView, mean_of, recommendation_text_for, trial_view
from stepscope.runs.reader import open_run
from stepscope.workloads.spec import Workload
from synthetic import write_run
from synthetic_trials import CNN, Trial, even_steps, write_lost_trial, write_repeats, write_trial

SHORT = Trial(steps=even_steps(30))


def ended(outcome: str, reason: str = "it failed", **evidence: Any) -> dict[str, Any]:
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


def test_successful_trial(view: TrialView) -> None:
    assert (view.name, view.outcome, view.tone, view.is_ok) == ("cnn", "ok", "good", True)
    assert view.samples_per_second == pytest.approx(32 / 0.05, rel=0.01)
    assert view.workload["pin"] is False and view.workload["classes"] == 10, "resolved default"
    assert (view.record.samples_per_step, view.warmup_steps, view.failure_details) == (32, 1, ())
    assert view.measured.host_memory_peak and view.measured.overhead.total
    sentence, command = view.recommendation_text.splitlines()
    assert sentence == "Repeat the trial for an interval of about ± 7.6%:"
    assert command == "stepscope trial cnn --workers 2 --repeat 5"


def test_view_of_a_run_or_its_folder(tmp_path: Path) -> None:
    folder = write_trial(tmp_path / "run", SHORT).folder
    assert trial_view(folder) == trial_view(str(folder)) == trial_view(open_run(folder))


def test_other_run_is_not_a_trial(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a trial"):
        trial_view(write_run(tmp_path / "run").folder)


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({}, "--seconds 1"),
        ({"steps": 6}, "--steps 24"),
        ({"steps": 2}, "--steps 16"),
        ({"epochs": 1}, "--epochs 6"),
        ({"epochs": 2}, "--epochs 8"),
        ({"seconds": 7.5}, "--seconds 30"),
    ],
)
def test_unsteady_trial_is_recommended_to_run_longer(
    tmp_path: Path, settings: dict[str, Any], option: str
) -> None:
    short = Trial(replace(CNN, **settings), even_steps(5), steps_per_epoch=3)
    view = view_of(tmp_path, short)
    assert not view.measured.steady.steady
    text = view.recommendation_text
    assert text.startswith("Run longer to reach a steady state:\nstepscope trial cnn")
    assert text.endswith(option)


def test_noisy_steps_are_recommended_to_run_longer(tmp_path: Path) -> None:
    """More steps help more than more processes."""
    noisy = view_of(tmp_path, replace(SHORT, steps=even_steps(30, noise=0.9)))
    assert noisy.measured.steady.steady
    assert noisy.recommendation_text.startswith("Run longer for a narrower interval:")


def test_existing_option_is_replaced(tmp_path: Path) -> None:
    typed = ["stepscope", "trial", "my net.py:f", "--steps", "6", "--lr", "0.1"]
    short = Trial(replace(CNN, steps=6), even_steps(5), facts={"command": typed})
    command = "stepscope trial 'my net.py:f' --lr 0.1 --steps 24"
    assert view_of(tmp_path, short).recommendation_text.endswith(command)


@pytest.mark.parametrize(
    ("typed", "recommended"),
    [
        ("cnn --json --steps 2", "cnn --steps 16"),
        ("-q --quiet cnn --out a --out=b --steps=2", "cnn --out=b --steps 16"),
        ("--profile cnn --pin --no-pin --compile", "--profile cnn --no-pin --compile --steps 16"),
    ],
)
def test_recommended_command(tmp_path: Path, typed: str, recommended: str) -> None:
    command = ["stepscope", "trial", *typed.split()]
    short = Trial(replace(CNN, steps=2), even_steps(1), facts={"command": command})
    _, line = view_of(tmp_path, short).recommendation_text.splitlines()
    assert line == f"stepscope trial {recommended}"


def test_busy_machine(tmp_path: Path) -> None:
    view = view_of(tmp_path, replace(Trial(), cpus=2.0))
    assert view.measured.has_interference
    text = "Run the trial again on an idle machine:\nstepscope trial cnn --workers 2"
    assert view.recommendation_text == recommendation_text_for([view, view]) == text
    plain = trial_dict(view)
    assert plain["interference"] is True and 0.25 < plain["other_cores"] < 1


def test_unknown_command(tmp_path: Path) -> None:
    view = view_of(tmp_path, replace(SHORT, facts={"command": None}))
    assert view.recommendation_text.endswith("stepscope trial … --repeat 5")


@pytest.mark.parametrize(
    ("outcome", "limits", "parts"),
    [
        ("gpu_oom", {}, ["--batch-size", "--accumulate"]),
        ("gpu_oom", {"gpu_memory": {"requested": 10**9}}, ["--batch-size", "--gpu-memory"]),
        ("host_oom", {"memory": {"requested": 10**9}}, ["--workers", "--prefetch", "--memory"]),
        ("shm_full", {"memory": {"requested": 10**9}}, ["--workers", "/dev/shm"]),
        ("timeout", {}, ["--timeout"]),
        ("interrupted", {}, ["Run the trial again:\nstepscope trial cnn --workers 2"]),
        ("crashed", {}, ["Run the trial again:\nstepscope trial cnn --workers 2"]),
    ],
)
def test_recommendation_after_a_failure(
    tmp_path: Path, outcome: str, limits: dict[str, Any], parts: list[str]
) -> None:
    view = view_of(tmp_path, replace(SHORT, exit_status=ended(outcome), limits=limits))
    assert view.exit_status.outcome is Outcome(outcome) and not view.is_ok
    assert all(part in view.recommendation_text for part in parts)
    assert ("--gpu-memory" in view.recommendation_text) == ("gpu_memory" in limits)


@pytest.mark.parametrize(
    ("workers", "steps", "limited", "text"),
    [
        (0, 0, True, "Raise --memory"),
        (0, 9, True, "Reduce --batch-size, or raise --memory"),
        (0, 0, False, "Free memory on this machine, or use a smaller workload"),
        (2, 0, False, "Reduce --workers, --prefetch or --batch-size"),
    ],
)
def test_recommendation_to_use_less_memory(
    tmp_path: Path, workers: int, steps: int, limited: bool, text: str
) -> None:
    limits = {"memory": {"requested": 1 << 30}} if limited else {}
    trial = Trial(
        replace(CNN, workers=workers),
        even_steps(steps),
        limits=limits,
        exit_status=ended("host_oom"),
    )
    paths = write_trial(tmp_path / "run", trial)
    if not steps:
        paths.trial_steps(0).unlink()
    assert trial_view(paths.folder).recommendation_text == text


def test_recommended_files(tmp_path: Path) -> None:
    crashed = write_trial(tmp_path / "a", replace(SHORT, exit_status=ended("crashed")))
    crashed.stderr_log.write_text("Traceback")
    text = f"Full error output:\n{crashed.stderr_log}"
    assert trial_view(crashed.folder).recommendation_text == text
    native = {**ended("crashed", "killed by SIGSEGV"), "signal": "SIGSEGV"}
    broken = write_trial(tmp_path / "b", replace(SHORT, exit_status=native))
    broken.stderr_log.write_text("Fatal Python error")
    text = f"The stack of the crash is at the end of:\n{broken.stderr_log}"
    assert trial_view(broken.folder).recommendation_text == text


def test_stalled_and_slow_trials(tmp_path: Path) -> None:
    stacks = {"stacks": "trial/stacks.txt", "phase": "training"}
    stalled = {
        **stacks,
        "limit": "stall_timeout",
        "stalled_at": "hang.py:6 in __getitem__ (pt_data_worker)",
    }
    exit_status = ended("timeout", "no progress for 300 s", **stalled)
    paths = write_trial(tmp_path / "a", replace(SHORT, exit_status=exit_status))
    paths.trial_stacks.touch()
    short = "Increase --timeout, or reduce the workload"
    assert trial_view(paths.folder).recommendation_text == short
    paths.trial_stacks.write_text("--- PID 1")
    view = trial_view(paths.folder)
    text = view.recommendation_text
    assert text.startswith("Training may be stuck on a sample, a lock or another rank.")
    assert text.endswith(f"\n{paths.trial_stacks}") and "--stall-timeout" in text
    location = "hang.py:6 in __getitem__ (pt_data_worker)"
    assert view.failure_details == (f"at step 31, last seen at {location}",)
    late = ended("timeout", "not finished after 9 s", **stacks)
    slow = write_trial(tmp_path / "b", replace(SHORT, exit_status=late))
    slow.trial_stacks.write_text("--- PID 1")
    text = trial_view(slow.folder).recommendation_text
    assert text == f"{short}. Stacks at the timeout:\n{slow.trial_stacks}"


def test_failure_details_are_the_error_of_a_rank(tmp_path: Path) -> None:
    """Neither other output nor counters."""
    exit_status = ended("gpu_oom", message="It broke", counters={"failcnt": 7}, stderr=["bye"])
    trial = replace(
        SHORT, exit_status=exit_status, rank_facts=failing(hint="Try less", where="v.py:2 in f")
    )
    view = view_of(tmp_path, trial)
    assert view.failure_details == ("RuntimeError: It broke (at v.py:2 in f)", "at step 31")
    assert view.recommendation_text == "Try less"


KILLS = {
    "cgroup_oom_kills_before": 3,
    "cgroup_oom_kills_after": 3,
    "machine_oom_kills_before": 3,
    "machine_oom_kills_after": 4,
}


@pytest.mark.parametrize(
    ("outcome", "evidence", "texts"),
    [
        (
            "host_oom",
            {"oom_kills": 1, "stderr": ["Killed"], "counters": {"memory.failcnt": 7}},
            ["peak 0.98 GiB of 1 GiB including page cache"],
        ),
        (
            "host_oom",
            {"limit": 1, "pss": 2, "rss": 3, "largest": {"7": 900 << 20, "8": 1}},
            ["peak 0.98 GiB of 1 GiB including page cache, the largest process used 900 MiB"],
        ),
        ("crashed", KILLS, ["1 OOM kill was recorded on the machine during the trial"]),
        ("crashed", {"message": "an error", "stderr": ["bye"]}, ["an error", "bye"]),
        ("timeout", {"phase": "importing the framework", "stderr": ["bye"]}, []),
    ],
)
def test_failure_details_from_evidence(
    tmp_path: Path, outcome: str, evidence: dict[str, Any], texts: list[str]
) -> None:
    limits = {
        "memory": {"requested": 1 << 30, "peak": int(0.98 * (1 << 30)), "enforced_by": "cgroup v1"}
    }
    trial = replace(SHORT, exit_status=ended(outcome, **evidence), limits=limits)
    errors = texts[:1] if "message" in evidence else []
    rest = texts[len(errors) :]
    assert view_of(tmp_path, trial).failure_details == (*errors, "at step 31", *rest)


@pytest.mark.parametrize(
    ("evidence", "facts", "progress"),
    [
        ({"phase": "importing the framework", "steps": 0}, {}, "while importing the framework"),
        ({}, {"phase": "data"}, "while preparing data"),
        ({"phase": "training", "steps": 27}, {}, "at step 27"),
    ],
)
def test_progress_of_a_failed_trial(
    tmp_path: Path, evidence: dict[str, Any], facts: dict[str, Any], progress: str
) -> None:
    trial = replace(SHORT, exit_status=ended("timeout", **evidence), rank_facts=lambda rank: facts)
    paths = write_trial(tmp_path / "run", trial)
    paths.trial_steps(0).unlink()
    assert trial_view(paths.folder).failure_details == (progress,)


def test_error_output_is_shown_without_warnings(tmp_path: Path) -> None:
    def output(*lines: str) -> tuple[str, ...]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        crashed = replace(SHORT, exit_status=ended("crashed", stderr=lines))
        return view_of(folder, crashed).failure_details[1:]

    numbered = [f"line {number}" for number in range(9)]
    assert output(*numbered) == tuple(numbered[-5:])
    warning = ["/x/y.py:12: UserWarning: old", "  warnings.warn(old)"]
    assert output(*warning, "  File x", "    f(y)", "    ^~~^") == ("  File x", "    f(y)")
    fatal = ["Fatal Python error: Segmentation fault", *numbered]
    assert output("before", *fatal) == tuple(fatal[:5])


def test_failed_ranks_are_named(tmp_path: Path) -> None:
    trial = Trial(
        Workload("cnn", ranks=2), even_steps(9), exit_status=ended("crashed"), rank_facts=failing()
    )
    errors = ("rank 0: RuntimeError: It broke", "rank 1: RuntimeError: It broke")
    assert view_of(tmp_path, trial).failure_details == (*errors, "at step 10")


def test_failure_details_do_not_repeat_the_reason(tmp_path: Path) -> None:
    exit_status = ended("crashed", "RuntimeError: It broke", message="It broke", stderr=["bye"])
    trial = replace(SHORT, exit_status=exit_status, rank_facts=failing())
    assert view_of(tmp_path / "a", trial).failure_details == ("at step 31",)
    located = replace(trial, rank_facts=failing(where="v.py:2 in f"))
    assert view_of(tmp_path / "b", located).failure_details == ("at v.py:2 in f", "at step 31")
    facts = failing(where="v.py:2 in f")(0) | {"phase": "closing"}
    closing = replace(trial, rank_facts=lambda rank: facts)
    assert view_of(tmp_path / "d", closing).failure_details == ("at v.py:2 in f", "at step 31")
    workload_error = replace(
        trial, exit_status=ended("crashed", "No data"), rank_facts=failing("workload", "No data")
    )
    assert view_of(tmp_path / "c", workload_error).failure_details == ("at step 31",)


def test_trial_of_a_killed_runner(tmp_path: Path) -> None:
    paths = write_lost_trial(tmp_path / "run", replace(SHORT, facts={"cleaned_ns": None}))
    paths.trial_rank(0).unlink()
    view = trial_view(paths.folder)
    assert view.exit_status.outcome is Outcome.LOST
    assert view.samples_per_second is not None, "from the recorded steps"
    assert view.measured.overhead.total is None
    assert view.recommendation_text == "Run the trial again:\nstepscope trial cnn --workers 2"


def test_running_trial_has_no_recommendation(tmp_path: Path) -> None:
    view = view_of(tmp_path, replace(SHORT, exit_status={"outcome": "running", "reason": ""}))
    assert (view.outcome, view.recommendation_text) == ("running", "")


def test_repeats_have_a_mean(tmp_path: Path) -> None:
    views = [trial_view(f) for f in write_repeats(tmp_path, SHORT, [1, 1.1, 0.95, 1.02, 0.99])]
    mean = mean_of(views)
    assert mean is not None
    rates = [view.samples_per_second or 0 for view in views]
    assert mean.mean == pytest.approx(sum(rates) / 5)
    assert mean.interval.low < mean.mean < mean.interval.high
    assert mean.noise.source == "learned" and 0.04 < mean.noise.cv < 0.07
    assert mean_of(views[:1]) is None
    assert all(view.recommendation_text == "" for view in views)


def test_mean_includes_only_successful_repeats(tmp_path: Path) -> None:
    good = [trial_view(f) for f in write_repeats(tmp_path / "a", SHORT, [1, 1.1])]
    bad = view_of(tmp_path / "b", replace(SHORT, exit_status=ended("crashed")))
    assert mean_of([*good, bad]) == mean_of(good)
    assert mean_of([good[0], bad]) is None


def test_every_key_is_in_the_json(view: TrialView, tmp_path: Path) -> None:
    plain = trial_dict(view)
    assert list(plain) == ["format", *(key for key, _, _ in KEYS)]
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["samples_per_second"] == view.samples_per_second
    assert plain["samples_per_second_low"] < plain["samples_per_second"]
    assert plain["step_seconds"] == pytest.approx(0.05, rel=0.02)
    assert plain["data_wait_share"] == pytest.approx(0.2, rel=0.01)
    assert (plain["outcome"], plain["noise_source"], plain["repeat"]) == ("ok", "assumed", 1)
    unknown = {key for key, value in plain.items() if value is None}
    assert unknown == {
        "signal",
        "rank_imbalance",
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


def test_unknown_values_are_null(tmp_path: Path) -> None:
    paths = write_trial(tmp_path / "run", Trial(CNN, [], exit_status=ended("crashed"), noise=None))
    paths.trial_rank(0).unlink()
    paths.trial_steps(0).unlink()
    plain = trial_dict(trial_view(paths.folder))
    assert json.dumps(plain, allow_nan=False)
    assert plain["samples_per_second"] is plain["step_seconds"] is plain["confidence"] is None
    assert (plain["steps"], plain["warmup_steps"], plain["no_throughput_reason"]) == (
        0,
        0,
        "no steps were completed",
    )


def test_repeats_as_json(tmp_path: Path) -> None:
    views = [trial_view(f) for f in write_repeats(tmp_path, SHORT, [1, 1.1, 0.95])]
    plain = trials_dict(views)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert [trial["repeat"] for trial in plain["trials"]] == [1, 2, 3] and plain["ok"] == 3
    assert plain["samples_per_second_low"] < plain["samples_per_second"]
    assert trials_dict(views[:1]) == trial_dict(views[0])


def test_keys_are_unique_and_described() -> None:
    keys = [key for key, _, _ in KEYS]
    assert len(set(keys)) == len(keys)
    assert all(description for _, _, description in KEYS)
