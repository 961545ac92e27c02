"""Trials as they are printed: in 80 columns, whatever became of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from stepscope.report.kit import terminal
from stepscope.report.trial.advice import AdviceKind, TrialAdvice
from stepscope.report.trial.document import trials_document
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
    "cpus": {"asked": 1.5, "by": "quota", "escaped": [{"pid": 7, "name": "python"}]},
    "memory": {"asked": 8 << 30, "by": "soft", "why": "no cgroup may be made", "note": "a note"},
    "gpu_memory": {"asked": 16 << 30, "by": "framework"},
    "gpus": {"asked": ["0", "1"], "by": "CUDA_VISIBLE_DEVICES"},
}


def printed(views: Sequence[TrialView], width: int = 80, colour: bool = False) -> str:
    out = io.StringIO()
    terminal.draw(Console(file=out, width=width, force_terminal=colour), trials_document(views))
    return out.getvalue()


def one(folder: Path, trial: Trial) -> str:
    return printed([trial_view(write_trial(folder / "run", trial).folder)])


def test_a_trial_that_went_well(tmp_path: Path) -> None:
    text = one(tmp_path, Trial())
    assert text.startswith("cnn  ok  ")
    text = " ".join(text.split())
    for part in (
        "jpeg data (generated), Intel Xeon Platinum 8480+, fp32, torch 2.14.1",
        "Samples/s 64",
        "± 17 % (53",
        "90 % sure)",
        "processes differ by 8.0 % (assumed: no repeats were seen here)",
        "Step 49.9 ms, p95 50.7 ms",
        "wait 9.98 ms, copy 2.49 ms, compute 37.4 ms",
        "Waiting for data 20 % of the time",
        "Warm-up 1 of 201 steps cut; the rest is steady",
        "Epoch 1 min 34 s, projected",
        "Host memory 1.",
        "first step 0.80 s",
        "Global batch 32 (32 per rank × 1 accumulated × 1 rank)",
        "Optimizer sgd, lr 0.01",
        "--repeat 5",
    ):
        assert part in text
    for absent in ("Cause", "GPU memory", "Energy", "Limits", "Ranks", "Left behind", "Note"):
        assert absent not in text


def test_everything_fits_80_columns_and_the_path_is_whole(tmp_path: Path) -> None:
    deep = tmp_path / "a long name" / ("folder" * 12)
    workload = Workload("resnet50", batch_size=256, accumulate=4, ranks=2, workers=8)
    trial = Trial(workload, even_steps(60), gpus=2, limits=LIMITS, facts={"left": ["/dev/shm/x"]})
    view = trial_view(write_trial(deep, trial).folder)
    lines = printed([view]).splitlines()
    paths = [line for line in lines if line.startswith(("Run folder", "Report"))]
    assert paths == [
        f"Run folder        {deep}",
        f"Report            {deep}/derived/report.html",
    ]
    assert max(len(line) for line in lines if line not in paths) <= 80
    text = "\n".join(lines)
    for part in (
        "Global batch      2,048  (256 per rank × 4 accumulated × 2 ranks)",
        "2.10 GB allocated, 2.60 GB reserved",
        "samples/J",
        "Limits            1.5 CPUs (quota), and 1 process escaped it",
        "8 GiB of host memory (soft; no cgroup may be made; a note)",
        "16 GiB of GPU memory, each rank (framework)",
        "GPU 0, 1 (CUDA_VISIBLE_DEVICES)",
        "the slowest takes 1.00 times the fastest's step",
        "Left behind       /dev/shm/x",
    ):
        assert part in text


def test_the_cause_comes_first(tmp_path: Path) -> None:
    text = one(tmp_path, Trial(CNN, even_steps(1), gpus=1, ending=OOM, limits=LIMITS))
    assert text.startswith("cnn  out of GPU memory  CUDA out of memory\n")
    assert text.index("Tried to allocate 2.00 GiB") < text.index("bye") < text.index("Samples/s")
    assert "Samples/s         –  2 steps are too few" in text
    assert "one step is too few to judge" in text
    assert "--gpu-memory" in text.splitlines()[-1] + text.splitlines()[-2]


def test_a_learnt_spread_is_said_to_be(tmp_path: Path) -> None:
    spread = {"cv": 0.012, "dof": 17, "source": "learnt", "trials": 20}
    assert "(learnt from 20 trials)" in one(tmp_path, replace(SHORT, spread=spread))


def test_an_assumption_with_few_repeats(tmp_path: Path) -> None:
    folders = write_repeats(tmp_path, SHORT, [1, 1.5, 0.8])
    text = " ".join(printed([trial_view(folder) for folder in folders]).split())
    assert "(from 3 repeats and an assumed 8.0 %)" in text
    spread = {"cv": 0.21, "dof": 6, "source": "assumed", "trials": 3}
    alone = " ".join(one(tmp_path / "alone", replace(SHORT, spread=spread)).split())
    assert "differ by 21 % (from 3 repeats and an assumption)" in alone


def test_a_command_is_never_wrapped_nor_a_path_in_a_cause_cut(tmp_path: Path) -> None:
    command = ["stepscope", "trial", "cnn", "--name", "n" * 90]
    path = "/long/" + "p" * 100
    view = trial_view(write_trial(tmp_path / "a", Trial(facts={"command": command})).folder)
    lines = printed([replace(view, cause=(f"no file {path}",))]).splitlines()
    assert lines[-2:] == ["For about ± 7.6 %:", " ".join([*command, "--repeat", "5"])]
    text = "".join(line.strip() for line in lines)
    assert path in text and "…" not in text


def test_a_busy_machine(tmp_path: Path) -> None:
    trial = replace(Trial(), cpus=2.0)
    text = " ".join(one(tmp_path, trial).split())
    assert "Note other processes used 0." in text
    assert "of 2 CPUs meanwhile: this is the rate of a busy machine" in text
    folders = write_repeats(tmp_path / "more", trial, [1, 1.1])
    text = " ".join(printed([trial_view(folder) for folder in folders]).split())
    assert "of 2 CPUs in trials 1, 2: these are the rates of a busy machine" in text
    assert "Try again when the machine is idle: stepscope trial" in text


def test_memory_beside_its_limit(tmp_path: Path) -> None:
    memory = {"asked": 1 << 30, "by": "cgroup v1", "peak": int(0.98 * (1 << 30))}
    text = " ".join(one(tmp_path, replace(SHORT, limits={"memory": memory})).split())
    limit = "1 GiB of host memory (cgroup v1), peak 0.98 GiB of it, page cache included"
    assert f"Limits {limit}" in text
    assert "GB at its peak, with shared library pages that its limit does not count" in text


def test_notes_and_the_optimizer_of_a_user(tmp_path: Path) -> None:
    told = {
        "data": {"name": "own", "note": "one", "notes": ["two", "three"]},
        "knobs": {"optimizer": "the user's", "lr": None},
    }
    text = " ".join(one(tmp_path, replace(SHORT, rank_facts=lambda rank: told)).split())
    assert "Optimizer the user's Data one two three Run folder" in text


def test_a_drift_is_told(tmp_path: Path) -> None:
    drifting = [0.05 * (1 + place / 100) for place in range(100)]
    text = " ".join(one(tmp_path, replace(SHORT, steps=drifting)).split())
    assert "steps cut; the step time rises by" in text
    assert "let it take longer" in text


def test_repeats(tmp_path: Path) -> None:
    folders = write_repeats(tmp_path, SHORT, [1, 1.1, 0.95, 1.02, 0.99])
    text = printed([trial_view(folder) for folder in folders])
    lines = text.splitlines()
    assert lines[0] == "cnn  5 of 5 trials ok"
    head = next(place for place, line in enumerate(lines) if line.startswith("Trial"))
    table = lines[head : head + 6]
    assert all(len(line) <= 80 for line in table)
    for title in ("Outcome", "Samples/s", "Step", "Data wait", "Host memory"):
        assert title in table[0]
    assert "GPU memory" not in table[0], "nothing is known of it"
    assert [line.split()[:2] for line in table[1:]] == [[str(n), "ok"] for n in range(1, 6)]
    assert "Mean samples/s 6" in " ".join(text.split()) and "(learnt from 5 trials)" in text
    assert "--repeat 10" in lines[-1]
    assert all(str(folder) in text for folder in folders)


def test_repeats_of_which_one_failed(tmp_path: Path) -> None:
    good = [trial_view(f) for f in write_repeats(tmp_path, SHORT, [1, 1.1])]
    bad = trial_view(
        write_trial(tmp_path / "bad", replace(SHORT, ending=OOM, facts={"repeat": 3})).folder
    )
    text = printed([*good, bad])
    assert text.startswith("cnn  2 of 3 trials ok")
    assert "out of GPU memory" in text and "Tried to allocate 2.00 GiB" in text
    assert "Cause, trial 3 CUDA out of memory. Tried" in " ".join(text.split())
    assert "Mean samples/s" in text
    assert "smaller --batch-size" in text
    hung = replace(bad, ending=replace(bad.ending, reason="it hung"), cause=("at step 3",))
    text = " ".join(printed([*good, hung]).split())
    assert "Cause, trial 3 it hung at step 3 Give" in text


def test_a_wide_terminal_has_room_for_more(tmp_path: Path) -> None:
    trial = replace(SHORT, gpus=1)
    views = [trial_view(folder) for folder in write_repeats(tmp_path, trial, [1, 1.1])]
    assert "GPU memory" in printed(views) and "Warm-up" not in printed(views)
    assert "Warm-up" in printed(views, width=130)


def test_colours_only_in_a_terminal_and_names_cannot_steer_it(tmp_path: Path) -> None:
    view = trial_view(write_trial(tmp_path / "run", SHORT).folder)
    assert "\x1b[" in printed([view], colour=True)
    evil = replace(view, name="a\x1b[2Jb[red]", cause=("x\x1b[2J\ny",))
    evil = replace(evil, recommendation=TrialAdvice(AdviceKind.HINT, hint="\x07"))
    text = printed([evil])
    assert "\x1b" not in text and "\x07" not in text
    assert text.startswith("a�[2Jb[red]  ok")


def test_what_was_killed_early_can_be_printed(tmp_path: Path) -> None:
    paths = write_lost_trial(tmp_path / "run", Trial(CNN, []))
    for file in paths.trial.iterdir():
        file.unlink()
    text = printed([trial_view(paths.folder)])
    assert text.startswith("cnn  lost") and "no step was taken" in text
