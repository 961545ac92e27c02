"""The progress of a fit: a spinner on a terminal, nothing where nobody watches."""

from __future__ import annotations

from stepscope.cli.bars import QuietBar


class FitBar(QuietBar):
    """`with FitBar(...) as bar`: `bar.show` what is probed now, `bar.tell` a line above it."""

    def __init__(self, name: str, quiet: bool) -> None:
        super().__init__(quiet)
        self._name = name

    def __enter__(self) -> FitBar:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if not self._quiet and console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TextColumn("{task.fields[said]}", markup=False),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=8)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=None, said="")
        return self

    def show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, said=text)
