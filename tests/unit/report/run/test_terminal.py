"""The summary in a terminal: at 80 columns, and as plain text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stepscope.report.bottleneck.view import diagnosis_view
from stepscope.report.kit.terminal import draw
from stepscope.report.run.document import brief_of, summary_of
from stepscope.report.run.view import RunView, run_view
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import open_run
from synthetic import Plan, write_cut_off_run, write_empty_run, write_run
from synthetic_diagnoses import BAD

FOLDER = Path("/somewhere/with a long path", *["folder"] * 12)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    plan = Plan(epochs=30, batches=9)
    return run_view(open_run(write_run(tmp_path_factory.mktemp("runs") / "run", plan).folder))


def printed(view: RunView, *, color: bool = False) -> str:
    out = io.StringIO()
    draw(Console(file=out, width=80, force_terminal=color), summary_of(view, FOLDER))
    return out.getvalue()


def wrapped(lines: list[str]) -> list[str]:
    """All lines but those that must stay whole, because users copy them."""
    return [line for line in lines if not line.startswith(("Report", "Details"))]


def epochs_header(text: str) -> str:
    (header,) = (line for line in text.splitlines() if line.split()[:2] == ["Epoch", "Time"])
    return header


def test_summary_fits_80_columns_but_the_path_is_not_wrapped(view: RunView) -> None:
    lines = printed(view).splitlines()
    assert f"Report    {RunPaths(FOLDER).report_html.as_uri()}" in lines
    assert max(map(len, wrapped(lines))) <= 80
    assert "\x1b" not in "".join(lines)


def test_content(view: RunView) -> None:
    text = printed(view)
    assert text.startswith(f"resnet18-cifar  ok  {view.exit_status.reason}\n")
    for part in (
        "Cores used    2.1",
        "CPU, % of 4 cores",
        "CPU, worker",
        "Network received",
        "18 more",
        "Phase     evaluation: 30 times",
        "Note      Tracking epochs and steps (PyTorch DataLoader and optimizer)",
        "Overhead  0.6% of one core",
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
    assert max(map(len, wrapped(text.splitlines()))) <= 80
    assert "…" not in re.sub(r"…  \d+ more", "", text), "nothing was shortened"
    header = epochs_header(text)
    for title in ("Samples/s", "Data wait", "Cores", "Energy"):
        assert title in header
    assert ("SM" in header) == plan.gpm
    assert ("Utilization" in header) != plan.gpm
    assert ("\nGPU 1 " in text) == (plan.gpus > 1)


def test_wide_terminal_has_more_columns(tmp_path: Path) -> None:
    view = run_view(open_run(write_run(tmp_path / "run", Plan(seconds=20, gpus=1)).folder))
    assert "Peak GPU memory" not in epochs_header(printed(view))
    out = io.StringIO()
    draw(Console(file=out, width=120), summary_of(view, FOLDER))
    assert "Peak GPU memory" in epochs_header(out.getvalue())


def test_colors_only_in_a_terminal(view: RunView) -> None:
    assert "\x1b[" in printed(view, color=True)


def test_name_cannot_control_the_terminal(view: RunView) -> None:
    text = printed(replace(view, name="a\x1b[2Jb[red]", command="x " * 500))
    assert "\x1b" not in text
    assert text.startswith("a�[2Jb[red]  ok")
    assert len(text.split("Duration")[0]) < 600


@pytest.mark.parametrize("write", [write_empty_run, write_cut_off_run])
def test_every_run_can_be_printed(write: type, tmp_path: Path) -> None:
    assert "Duration" in printed(run_view(open_run(write(tmp_path / "run").folder)))


def brief(view: RunView) -> list[str]:
    out = io.StringIO()
    draw(Console(file=out, width=80), brief_of(view, Path("runs/one")))
    return out.getvalue().splitlines()


def test_brief_summary_has_the_finding_first_and_ten_lines(view: RunView) -> None:
    lines = brief(replace(view, finding=diagnosis_view(BAD)))
    assert [line.split()[0] for line in lines if line and not line.startswith(" ")] == [
        *("resnet18-cifar", "Bottleneck", "Gain", "Action", "Training", "Resources", "Overhead"),
        *("Report", "Details"),
    ]
    assert len(lines) <= 12


def test_brief_summary_of_a_command_that_failed_at_once(tmp_path: Path) -> None:
    exit_status = {"outcome": "crashed", "reason": "exit code 1", "exit_code": 1}
    paths = write_run(tmp_path / "run", Plan(epochs=0, batches=0, exit_status=exit_status))
    lines = brief(run_view(open_run(paths.folder)))
    assert [line.split()[0] for line in lines if line] == ["resnet18-cifar", "Duration", "Report"]
    assert "crashed" in lines[0] and "exit code 1" in lines[0]


def test_brief_summary_has_at_most_three_warnings(view: RunView) -> None:
    lines = brief(replace(view, warnings=("GPU 1 was lost",) * 5))
    assert sum("GPU 1 was lost" in line for line in lines) == 3
