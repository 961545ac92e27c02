"""The progress of a study: a bar on a terminal, a line for each trial elsewhere."""

from __future__ import annotations

import gc

from stepscope.cli.bars import QuietBar
from stepscope.report.format import rate_text, seconds_text
from stepscope.report.studyplan import headline, plan_view
from stepscope.studies.design import Design
from stepscope.studies.engine import Moment, trial_text
from stepscope.studies.result import Result
from stepscope.studies.spec import levels_text, setting
from stepscope.studies.study import Study


class StudyBar(QuietBar):
    """`with StudyBar(...) as bar`: an onlooker of a study."""

    def __init__(self, design: Design, quiet: bool) -> None:
        super().__init__(quiet)
        self._design = design

    def __enter__(self) -> StudyBar:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        console = Console(stderr=True)
        if not self._quiet and console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[left]}", markup=False),
                TextColumn("{task.fields[best]}", markup=False),
                TextColumn(
                    "{task.fields[said]}",
                    markup=False,
                    table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
                ),
            )
            self._bar = Progress(
                *columns, console=console, transient=True, refresh_per_second=4, expand=True
            )
            self._bar.start()
            self._task = self._bar.add_task(self._design.name, total=1.0, left="", best="", said="")
        return self

    def begins(self, study: Study) -> None:
        """What will be run, in a line or two."""
        gc.enable()
        if self._quiet:
            return
        view = plan_view(study)
        for text in (headline(view), *view.remarks):
            self.tell(text)

    def show(self, moment: Moment) -> None:
        if self._bar is None:
            return
        every = moment.done + moment.to_come
        share = moment.progress.share or 0.0
        self._bar.update(
            self._task,
            description=f"{self._design.name} {moment.done}/{every}",
            total=max(1, every),
            completed=moment.done + min(share, 0.99) * (moment.role == "trial"),
            left="" if moment.left_s is None else f"{seconds_text(moment.left_s)} left",
            best=_best(moment),
            said=self._said(moment),
        )

    def over(self, result: Result, moment: Moment) -> None:
        if self._quiet or self._bar is not None:
            return
        every = moment.done + moment.to_come
        self.tell(f"[{moment.done}/{every}] {self._line(result)}{_left(moment)}")

    def _said(self, moment: Moment) -> str:
        what = "sentinel" if moment.role == "sentinel" else trial_text(moment.spec, self._design)
        best = moment.best
        with_best = f" · best: {self._levels(best)}" if best is not None else ""
        return f"{what}: {moment.progress.phase}{with_best}"

    def _line(self, result: Result) -> str:
        name = "sentinel" if result.role == "sentinel" else self._levels(result)
        again = f", attempt {result.attempt}" if result.attempt > 1 else ""
        if result.is_ok:
            noise = f" (disturbed: {'; '.join(result.noise)})" if result.noise else ""
            return f"{name}{again}: {rate_text(result.throughput)} samples/s{noise}"
        return f"{name}{again}: {result.outcome.value}: {result.reason}"

    def _levels(self, result: Result) -> str:
        names = [factor.name for factor in self._design.factors]
        levels = {name: setting(result.settings, name) for name in names}
        return levels_text(levels) or str(result.settings.get("model", ""))


def _best(moment: Moment) -> str:
    rate = moment.best.throughput if moment.best else None
    return f"best {rate_text(rate)}/s" if rate else ""


def _left(moment: Moment) -> str:
    return "" if moment.left_s is None else f" · {seconds_text(moment.left_s)} left"
