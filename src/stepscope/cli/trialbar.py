"""The progress of trials: a bar on a terminal, nothing where nobody watches."""

from __future__ import annotations

from stepscope.cli.bars import QuietBar
from stepscope.trials.pulse import Progress

_NEVER_DONE = 0.99
"""A full bar stops its clock, and there is still something to clean up."""


class TrialBar(QuietBar):
    """`with TrialBar(...) as bar`: `bar.show` a trial's progress, `bar.tell` a line above it."""

    def __init__(self, name: str, repeats: int, quiet: bool) -> None:
        super().__init__(quiet)
        self._name = name
        self._repeats = repeats

    def __enter__(self) -> TrialBar:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        if not self._quiet and console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[said]}"),
                TimeElapsedColumn(),
            )
            self._bar = Bar(*columns, console=console, transient=True, refresh_per_second=5)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=1.0, said="")
            self._number = 0
        return self

    def show(self, number: int, progress: Progress) -> None:
        if self._bar is None:
            return
        if number != self._number:
            self._number = number
            self._bar.reset(self._task)
        of = f" {number}/{self._repeats}" if self._repeats > 1 else ""
        self._bar.update(
            self._task,
            description=f"{self._name}{of}",
            completed=min(progress.share or 0.0, _NEVER_DONE),
            said=_said(progress),
        )


def _said(progress: Progress) -> str:
    if not progress.steps:
        return progress.phase
    if progress.phase != "training":
        return progress.phase
    of = f" of {progress.planned}" if progress.planned else ""
    rate = progress.samples_per_second
    return f"step {progress.steps}{of}" + (f", {rate:,.0f} samples/s" if rate else "")
