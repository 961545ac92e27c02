"""Find a bottleneck, fix it, and compare: `make demo`.

Trains examples/demo/train.py twice under `stepscope run`: as it is, where the training loop waits
for slow storage, and with the loader workers that fix it.
"""

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import stepscope
from stepscope.opened_run import OpenedRun

SCRIPT = Path(__file__).with_name("train.py")
RUNS = Path("runs")


def train(name: str, *options: str) -> OpenedRun:
    """Run the script under stepscope, as a user would, and open what it recorded."""
    script = SCRIPT.relative_to(Path.cwd()) if SCRIPT.is_relative_to(Path.cwd()) else SCRIPT
    command = ["python", str(script), *options]
    console.print(f"\n[bold]$ stepscope run -- {' '.join(command)}[/]")
    stepscope_run = [sys.executable, "-m", "stepscope", "run", "--name", name, "--out", str(RUNS)]
    done = subprocess.run([*stepscope_run, "--", sys.executable, *command[1:]], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return stepscope.open_run(stepscope.latest_run(RUNS))


def difference(before: OpenedRun, after: OpenedRun) -> Table:
    table = Table("", "Before", "After", box=None, header_style="bold", pad_edge=False)
    for label, key, text in (
        ("Time per epoch", "seconds", "{:.1f} s"),
        ("Samples/s", "samples_per_second", "{:,.0f}"),
        ("Data wait", "data_wait_share", "{:.0%}"),
    ):
        values = [getattr(run.summary().epochs[-1], key) for run in (before, after)]
        table.add_row(label, *(text.format(value) for value in values))
    return table


def main() -> None:
    before = train("before")
    finding = before.explain().first
    console.print(f"\nFound: {finding.title}. The same training with 2 loader workers:")
    after = train("after", "--workers", "2")
    console.print()
    console.print(difference(before, after))
    first, second = (run.summary().epochs[-1].samples_per_second for run in (before, after))
    bound = f", bound {finding.speedup_bound:.1f}×" if finding.speedup_bound else ""
    console.print(f"\n[bold]Speed-up {second / first:.1f}×[/] (measured{bound})")


if __name__ == "__main__":
    console = Console(highlight=False)
    main()
