"""The summary as it is printed: at 80 columns, and as plain text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stepscope.report.kit.terminal import draw
from stepscope.report.run.document import summary_of
from stepscope.report.run.view import RunView, run_view
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import open_run
from synthetic import Plan, write_cut_off_run, write_empty_run, write_run

REPORT = Path("/somewhere/with a long path", *["folder"] * 12, "report.html")


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    plan = Plan(epochs=30, batches=9)
    return run_view(open_run(write_run(tmp_path_factory.mktemp("runs") / "run", plan).folder))


def printed(view: RunView, *, colour: bool = False) -> str:
    out = io.StringIO()
    draw(Console(file=out, width=80, force_terminal=colour), summary_of(view, REPORT))
    return out.getvalue()


def test_everything_fits_80_columns_and_the_path_is_whole(view: RunView) -> None:
    lines = printed(view).splitlines()
    assert lines[-1] == f"Report    {REPORT}"
    assert max(len(line) for line in lines[:-1]) <= 80
    assert "\x1b" not in "".join(lines)


def test_what_is_told(view: RunView) -> None:
    text = printed(view)
    assert text.startswith("resnet18-cifar  ok  the command ended by itself with exit code 0\n")
    for part in (
        "Cores used         2.1",
        "CPU, share of 4",
        "CPU of worker",
        "network in",
        "18 more",
        "Phase     evaluation: 30 times",
        "Note      hook: DataLoader, optimizer",
        "Watching  0.6 % of one core",
    ):
        assert part in text
    assert "Peak memory" in text.split("Epoch ")[1]


WITH_GPUS = [
    Plan(gpus=1),
    Plan(gpus=4, idle_gpus=1, epochs=30, batches=9),
    Plan(gpus=1, gpm=False, allocator=False),
    Plan(seconds=700, gpus=2, epochs=11, batches=4),
]


@pytest.mark.parametrize("plan", WITH_GPUS)
@pytest.mark.parametrize("write", [write_run, write_cut_off_run])
def test_gpus_fit_80_columns(plan: Plan, write: Callable[..., RunPaths], tmp_path: Path) -> None:
    text = printed(run_view(open_run(write(tmp_path / "run", plan).folder)))
    assert max(len(line) for line in text.splitlines()[:-1]) <= 80
    assert "…" not in re.sub(r"…  \d+ more", "", text), "nothing had to be cut to fit"
    (ledger,) = (line for line in text.splitlines() if line.split()[:2] == ["Epoch", "Time"])
    for title in ("Samples/s", "Data wait", "Cores", "Energy"):
        assert title in ledger
    assert ("SM" in ledger) == plan.gpm
    assert ("Utilisation" in ledger) != plan.gpm
    assert ("\nGPU 1 " in text) == (plan.gpus > 1)


def test_a_wide_terminal_has_room_for_more(tmp_path: Path) -> None:
    view = run_view(open_run(write_run(tmp_path / "run", Plan(seconds=20, gpus=1)).folder))
    assert "Peak GPU memory" not in printed(view)
    out = io.StringIO()
    draw(Console(file=out, width=120), summary_of(view, REPORT))
    assert "Peak GPU memory" in out.getvalue()


def test_colours_only_in_a_terminal(view: RunView) -> None:
    assert "\x1b[" in printed(view, colour=True)


def test_name_cannot_steer_the_terminal(view: RunView) -> None:
    text = printed(replace(view, name="a\x1b[2Jb[red]", command="x " * 500))
    assert "\x1b" not in text
    assert text.startswith("a�[2Jb[red]  ok")
    assert len(text.split("Duration")[0]) < 600


@pytest.mark.parametrize("write", [write_empty_run, write_cut_off_run])
def test_every_run_can_be_printed(write: type, tmp_path: Path) -> None:
    assert "Duration" in printed(run_view(open_run(write(tmp_path / "run").folder)))
