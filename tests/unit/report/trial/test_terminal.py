"""Trials in a terminal with 80 columns, for all outcomes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from stepscope.report.kit import terminal
from stepscope.report.trial.document import trials_document
from stepscope.report.trial.recommendation import RecommendationKind, TrialRecommendation
from stepscope.report.trial.view import TrialView, trial_view
from stepscope.workloads.spec import Workload
from synthetic_trials import CNN, Trial, even_steps, write_lost_trial, write_repeats, write_trial

SHORT = Trial(steps=even_steps(30))
OOM = {
    "outcome": "gpu_oom",
    "reason": "CUDA out of memory",
    "exit_code": 1,
    "signal": None,
    "evidence": {"message": "CUDA out of memory. Tried to allocate 2.00 GiB", "stderr": ["bye"]},
}
LIMITS: dict[str, Any] = {
    "cpus": {"requested": 1.5, "enforced_by": "quota", "escaped": [{"pid": 7, "name": "python"}]},
    "memory": {
        "requested": 8 << 30,
        "enforced_by": "soft",
        "reason": "no cgroup may be made",
        "note": "a note",
    },
    "gpu_memory": {"requested": 16 << 30, "enforced_by": "framework"},
    "gpus": {"requested": ["0", "1"], "enforced_by": "CUDA_VISIBLE_DEVICES"},
}


def printed(views: Sequence[TrialView], width: int = 80, color: bool = False) -> str:
    out = io.StringIO()
    terminal.draw(Console(file=out, width=width, force_terminal=color), trials_document(views))
    return out.getvalue()


def one(folder: Path, trial: Trial) -> str:
    return printed([trial_view(write_trial(folder / "run", trial).folder)])


def test_successful_trial(tmp_path: Path) -> None:
    text = one(tmp_path, Trial())
    assert text.startswith("cnn  ok  ")
    text = " ".join(text.split())
    for part in (
        "jpeg data (generated), Intel Xeon Platinum 8480+, fp32, torch 2.14.1",
        "Samples/s 64",
        "± 17% (53",
        "90% confidence)",
        "Noise 8.0% between processes (assumed: no repeats on this machine), ",
        "Step 49.9 ms, p95 50.7 ms",
        "wait 9.98 ms, copy 2.49 ms, compute 37.4 ms",
        "Data wait 20% of the time",
        "Warm-up 1 of 201 steps; the other steps are steady",
        "Epoch 1 min 34 s (estimated)",
        "Host memory 1.",
        "first step 0.80 s",
        "Global batch 32 (32 per rank × 1 accumulated × 1 rank)",
        "Optimizer sgd, lr 0.01",
        "--repeat 5",
    ):
        assert part in text
    for absent in ("Failure", "GPU memory", "Energy", "Limits", "Ranks", "Leftovers", "Note"):
        assert absent not in text


def test_80_columns_with_complete_paths(tmp_path: Path) -> None:
    deep = tmp_path / "a long name" / ("folder" * 12)
    workload = Workload("resnet50", batch_size=256, accumulate=4, ranks=2, workers=8)
    trial = Trial(
        workload, even_steps(60), gpus=2, limits=LIMITS, facts={"leftovers": ["/dev/shm/x"]}
    )
    view = trial_view(write_trial(deep, trial).folder)
    lines = printed([view]).splitlines()
    paths = [line for line in lines if line.startswith(("Run folder", "Report"))]
    assert paths == [
        f"Run folder     {deep}",
        f"Report         {(deep / 'derived' / 'report.html').as_uri()}",
    ]
    assert max(len(line) for line in lines if line not in paths) <= 80
    text = "\n".join(lines)
    for part in (
        "Global batch   2,048  (256 per rank × 4 accumulated × 2 ranks)",
        "1.96 GiB allocated, 2.42 GiB reserved",
        "samples/J",
        "Limits         1.5 CPUs (quota), 1 process escaped the limit",
        "8 GiB host memory (soft; no cgroup may be made; a note)",
        "16 GiB GPU memory per rank (framework)",
        "GPU 0, 1 (CUDA_VISIBLE_DEVICES)",
        "a step takes 1.00× as long on the slowest rank as on the fastest",
        "Leftovers      /dev/shm/x",
    ):
        assert part in text


def test_failure_comes_first(tmp_path: Path) -> None:
    text = one(tmp_path, Trial(CNN, even_steps(1), gpus=1, exit_status=OOM, limits=LIMITS))
    assert text.startswith("cnn  out of GPU memory  CUDA out of memory\n")
    assert text.index("Tried to allocate 2.00 GiB") < text.index("bye") < text.index("Samples/s")
    assert "Samples/s      –  (only 2 steps were completed)" in text
    assert "too few steps to detect drift (1 step)" in text
    assert "--gpu-memory" in text.splitlines()[-1] + text.splitlines()[-2]


def test_measured_noise(tmp_path: Path) -> None:
    noise = {"cv": 0.012, "dof": 17, "source": "learned", "trials": 20}
    assert "(measured in 20 trials)" in one(tmp_path, replace(SHORT, noise=noise))


def test_noise_from_few_repeats_and_an_assumption(tmp_path: Path) -> None:
    folders = write_repeats(tmp_path, SHORT, [1, 1.5, 0.8])
    text = " ".join(printed([trial_view(folder) for folder in folders]).split())
    assert "(from 3 repeats and a default of 8.0%)" in text
    noise = {"cv": 0.21, "dof": 6, "source": "assumed", "trials": 3}
    single = " ".join(one(tmp_path / "alone", replace(SHORT, noise=noise)).split())
    assert "Noise 21% between processes (from 3 repeats and a default)" in single


def test_commands_are_not_wrapped_and_paths_are_not_cut(tmp_path: Path) -> None:
    command = ["stepscope", "trial", "cnn", "--name", "n" * 90]
    path = "/long/" + "p" * 100
    view = trial_view(write_trial(tmp_path / "a", Trial(facts={"command": command})).folder)
    lines = printed([replace(view, failure_details=(f"no file {path}",))]).splitlines()
    assert lines[-2:] == [
        "Repeat the trial for an interval of about ± 7.6%:",
        " ".join([*command, "--repeat", "5"]),
    ]
    text = "".join(line.strip() for line in lines)
    assert path in text and "…" not in text


def test_busy_machine(tmp_path: Path) -> None:
    trial = replace(Trial(), cpus=2.0)
    text = " ".join(one(tmp_path, trial).split())
    assert "Note other processes used 0." in text
    assert "of 2 CPUs, so the throughput is that of a busy machine" in text
    folders = write_repeats(tmp_path / "more", trial, [1, 1.1])
    text = " ".join(printed([trial_view(folder) for folder in folders]).split())
    assert "of 2 CPUs in trials 1, 2, so the throughput is that of a busy machine" in text
    assert "Run the trial again on an idle machine: stepscope trial" in text


def test_memory_limit_and_peak(tmp_path: Path) -> None:
    memory = {"requested": 1 << 30, "enforced_by": "cgroup v1", "peak": int(0.98 * (1 << 30))}
    text = " ".join(one(tmp_path, replace(SHORT, limits={"memory": memory})).split())
    limit = "1 GiB host memory (cgroup v1), peak 0.98 GiB including page cache"
    assert f"Limits {limit}" in text
    assert "GiB peak (includes shared library pages that the limit does not count)" in text


def test_notes_and_optimizer_of_a_custom_workload(tmp_path: Path) -> None:
    facts = {
        "data": {"name": "custom", "note": "one", "notes": ["two", "three"]},
        "settings": {"optimizer": "the user's", "lr": None},
    }
    text = " ".join(one(tmp_path, replace(SHORT, rank_facts=lambda rank: facts)).split())
    assert "Optimizer the user's Data one two three Run folder" in text


def test_drift(tmp_path: Path) -> None:
    drifting = [0.05 * (1 + step / 100) for step in range(100)]
    text = " ".join(one(tmp_path, replace(SHORT, steps=drifting)).split())
    assert "steps; the step time rises by" in text
    assert "Run longer to reach a steady state" in text


def test_repeats(tmp_path: Path) -> None:
    folders = write_repeats(tmp_path, SHORT, [1, 1.1, 0.95, 1.02, 0.99])
    text = printed([trial_view(folder) for folder in folders])
    lines = text.splitlines()
    assert lines[0] == "cnn  5 of 5 trials ok"
    head = next(index for index, line in enumerate(lines) if line.startswith("Trial"))
    table = lines[head : head + 6]
    assert all(len(line) <= 80 for line in table)
    for title in ("Outcome", "Samples/s", "Step", "Data wait", "Host memory"):
        assert title in table[0]
    assert "GPU memory" not in table[0], "unknown"
    assert [line.split()[:2] for line in table[1:]] == [[str(n), "ok"] for n in range(1, 6)]
    assert "Mean samples/s 6" in " ".join(text.split()) and "(measured in 5 trials)" in text
    assert "--repeat 10" in lines[-1]
    assert all(str(folder) in text for folder in folders)


def test_repeats_with_a_failure(tmp_path: Path) -> None:
    good = [trial_view(f) for f in write_repeats(tmp_path, SHORT, [1, 1.1])]
    bad = trial_view(
        write_trial(tmp_path / "bad", replace(SHORT, exit_status=OOM, facts={"repeat": 3})).folder
    )
    text = printed([*good, bad])
    assert text.startswith("cnn  2 of 3 trials ok")
    assert "out of GPU memory" in text and "Tried to allocate 2.00 GiB" in text
    assert "Failure, trial 3 CUDA out of memory. Tried" in " ".join(text.split())
    assert "Mean samples/s" in text
    assert "Reduce --batch-size" in text
    stalled = replace(
        bad,
        exit_status=replace(bad.exit_status, reason="no progress"),
        failure_details=("at step 3",),
    )
    text = " ".join(printed([*good, stalled]).split())
    assert "Failure, trial 3 no progress at step 3 Reduce" in text


def test_wide_terminal_shows_more_columns(tmp_path: Path) -> None:
    trial = replace(SHORT, gpus=1)
    views = [trial_view(folder) for folder in write_repeats(tmp_path, trial, [1, 1.1])]
    assert "GPU memory" in printed(views) and "Warm-up" not in printed(views)
    assert "Warm-up" in printed(views, width=130)


def test_colors_only_in_a_terminal_and_texts_are_escaped(tmp_path: Path) -> None:
    view = trial_view(write_trial(tmp_path / "run", SHORT).folder)
    assert "\x1b[" in printed([view], color=True)
    unsafe = replace(view, name="a\x1b[2Jb[red]", failure_details=("x\x1b[2J\ny",))
    hint = TrialRecommendation(RecommendationKind.HINT, hint="\x07")
    unsafe = replace(unsafe, recommendation=hint)
    text = printed([unsafe])
    assert "\x1b" not in text and "\x07" not in text
    assert text.startswith("a�[2Jb[red]  ok")


def test_trial_that_was_killed_early(tmp_path: Path) -> None:
    paths = write_lost_trial(tmp_path / "run", Trial(CNN, []))
    for file in paths.trial.iterdir():
        file.unlink()
    text = printed([trial_view(paths.folder)])
    assert text.startswith("cnn  lost") and "no steps were completed" in text
