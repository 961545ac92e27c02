"""The progress of fits, trials and studies: a bar on a terminal, elsewhere lines or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.cli.console import say
from stepscope.report.kit.format import rate_text, seconds_text

if TYPE_CHECKING:
    from stepscope.analysis.study.drift import BlockJudged
    from stepscope.studies.design.records import Design
    from stepscope.studies.engine import ProgressEvent
    from stepscope.studies.results import Result
    from stepscope.studies.study import ScannedStudy
    from stepscope.trials.heartbeat import Progress

_NEVER_DONE = 0.99
"""A full bar stops its clock, and there is still something to clean up."""
_Self = TypeVar("_Self", bound="ProgressBar")


class ProgressBar:
    """`with ProgressBar(...) as bar`: `bar.tell` writes a line above it.

    Without a terminal nothing is drawn, and where quiet was asked for nothing is told either.
    """

    fields: tuple[str, ...] = ("said",)  # texts beside the bar; the last takes what space is left
    is_timed = True
    total: float | None = 1.0  # None: no telling how much there is to do

    def __init__(self, name: str, quiet: bool) -> None:
        self._name = name
        self._quiet = quiet
        self._bar: Any = None

    def __enter__(self: _Self) -> _Self:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        console = Console(stderr=True)
        if self._quiet or not console.is_terminal:
            return self
        last = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        columns = (
            TextColumn("{task.description}", markup=False),
            SpinnerColumn() if self.total is None else BarColumn(bar_width=20),
            *(
                TextColumn(
                    f"{{task.fields[{field}]}}",
                    markup=False,
                    table_column=last if field == self.fields[-1] else None,
                )
                for field in self.fields
            ),
            *((TimeElapsedColumn(),) if self.is_timed else ()),
        )
        self._bar = Bar(
            *columns, console=console, transient=True, refresh_per_second=5, expand=True
        )
        self._bar.start()
        empty = dict.fromkeys(self.fields, "")
        self._task = self._bar.add_task(self._name, total=self.total, **empty)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def tell(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(f"stepscope: {text}", markup=False, highlight=False)
        else:
            say(text)


class FitBar(ProgressBar):
    """Shows what is probed now."""

    total = None

    def show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, said=text)


class TrialBar(ProgressBar):
    """Shows the progress of one trial after the other."""

    def __init__(self, name: str, repeats: int, quiet: bool) -> None:
        super().__init__(name, quiet)
        self._repeats = repeats
        self._number = 0

    def show(self, number: int, progress: Progress) -> None:
        if self._bar is None:
            return
        if number != self._number:
            self._number = number
            self._bar.reset(self._task)
        said = progress.phase
        if progress.steps and progress.phase == "training":
            of = f" of {progress.planned}" if progress.planned else ""
            rate = progress.samples_per_second
            said = f"step {progress.steps}{of}" + (f", {rate:,.0f} samples/s" if rate else "")
        of = f" {number}/{self._repeats}" if self._repeats > 1 else ""
        self._bar.update(
            self._task,
            description=f"{self._name}{of}",
            completed=min(progress.share or 0.0, _NEVER_DONE),
            said=said,
        )


class StudyBar(ProgressBar):
    """Listens to a study. Without a terminal, it tells a line for each trial."""

    fields = ("left", "best", "said")
    is_timed = False

    def __init__(self, design: Design, quiet: bool) -> None:
        super().__init__(design.name, quiet)
        self._design = design
        self.begun: ScannedStudy | None = None

    def begins(self, study: ScannedStudy) -> None:
        """What will be run, in a line or two."""
        from stepscope.report.study.plan import headline, plan_view

        self.begun = study
        if not self._quiet:
            view = plan_view(study)
            for text in (headline(view), *view.remarks):
                self.tell(text)

    def show(self, moment: ProgressEvent) -> None:
        from stepscope.studies.trial_spec import trial_text

        if self._bar is None:
            return
        every = moment.done + (moment.to_come or 0)
        if moment.attempt.is_reference:
            what, share = "sentinel", 0.0
        else:
            what = trial_text(moment.spec, self._design.factors)
            share = min(moment.progress.share or 0.0, _NEVER_DONE)
        best = moment.best
        said = f"{what}: {moment.progress.phase}"
        self._bar.update(
            self._task,
            description=f"{self._name} {moment.done}/{every}",
            total=max(1, every),
            completed=moment.done + share,
            left="" if moment.left_s is None else f"{seconds_text(moment.left_s)} left",
            best=f"best {rate_text(best.throughput)}/s" if best and best.throughput else "",
            said=f"{said} · best: {self._levels(best)}" if best else said,
        )

    def disturbed(self, block: BlockJudged) -> None:
        from stepscope.report.study.sentences import block_reasons

        reasons = "; ".join(block_reasons(block))
        again = "it will be run again" if self._design.reruns else "it is not run again"
        self.tell(f"block {block.number} was disturbed: {reasons}: {again}")

    def over(self, result: Result, moment: ProgressEvent) -> None:
        if self._quiet or self._bar is not None:
            return
        name = "sentinel" if result.is_reference else self._levels(result)
        again = f", attempt {result.attempt}" if result.attempt > 1 else ""
        what = f"{result.outcome.value}: {result.reason}"
        if result.is_ok:
            what = f"{rate_text(result.throughput)} samples/s"
            if result.noise:
                from stepscope.report.study.sentences import interference_text

                what += f" (disturbed: {'; '.join(map(interference_text, result.noise))})"
        left = "" if moment.left_s is None else f" · {seconds_text(moment.left_s)} left"
        every = moment.done + (moment.to_come or 0)
        self.tell(f"[{moment.done}/{every}] {name}{again}: {what}{left}")

    def _levels(self, result: Result) -> str:
        from stepscope.studies.trial_spec import levels_text, setting

        names = [factor.name for factor in self._design.factors]
        levels = {name: setting(result.settings, name) for name in names}
        return levels_text(levels) or str(result.settings.get("model", ""))
