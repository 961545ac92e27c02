"""Progress of fits, trials and studies: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.cli.console import print_message
from stepscope.report.kit.format import rate_text, seconds_text

if TYPE_CHECKING:
    from stepscope.analysis.study.drift import BlockJudged
    from stepscope.studies.design.records import Design
    from stepscope.studies.engine import ProgressEvent
    from stepscope.studies.results import Result
    from stepscope.studies.study import ScannedStudy
    from stepscope.trials.heartbeat import Progress

_MAX_SHARE = 0.99
"""A full bar would stop its clock while the trial is still being cleaned up."""
_Self = TypeVar("_Self", bound="ProgressBar")


class ProgressBar:
    """A progress bar as a context manager; `notify` prints a line above it.

    The bar is drawn only on a terminal. With `quiet`, nothing is printed.
    """

    is_timed = True
    total: float | None = 1.0  # None: unknown

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
        status = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        columns = (
            TextColumn("{task.description}", markup=False),
            SpinnerColumn() if self.total is None else BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}", markup=False, table_column=status),
            *((TimeElapsedColumn(),) if self.is_timed else ()),
        )
        self._bar = Bar(
            *columns, console=console, transient=True, refresh_per_second=5, expand=True
        )
        self._bar.start()
        self._task = self._bar.add_task(self._name, total=self.total, status="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def notify(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(f"stepscope: {text}", markup=False, highlight=False)
        else:
            print_message(text)


class FitBar(ProgressBar):
    """Shows the current probe."""

    total = None

    def show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, status=text)


class TrialBar(ProgressBar):
    """Shows the progress of a trial, or of its repeats one by one."""

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
        status = progress.phase
        if progress.steps and progress.phase == "training":
            planned = f" of {progress.planned}" if progress.planned else ""
            status = f"step {progress.steps}{planned}"
            if progress.samples_per_second:
                status += f", {progress.samples_per_second:,.0f} samples/s"
        repeat = f" {number}/{self._repeats}" if self._repeats > 1 else ""
        self._bar.update(
            self._task,
            description=f"{self._name}{repeat}",
            completed=min(progress.share or 0.0, _MAX_SHARE),
            status=status,
        )


class StudyBar(ProgressBar):
    """The listener of a study. Without a terminal, it prints a line for each trial."""

    is_timed = False

    def __init__(self, design: Design, quiet: bool) -> None:
        super().__init__(design.name, quiet)
        self._design = design
        self.study: ScannedStudy | None = None

    def study_started(self, study: ScannedStudy) -> None:
        from stepscope.report.study.plan import headline, plan_view

        self.study = study
        if not self._quiet:
            view = plan_view(study)
            for text in (headline(view), *view.remarks):
                self.notify(text)

    def show(self, event: ProgressEvent) -> None:
        from stepscope.studies.trial_spec import trial_text

        if self._bar is None:
            return
        if event.attempt.is_reference:
            trial, share = "reference trial", 0.0
        else:
            trial = trial_text(event.spec, self._design.factors)
            share = min(event.progress.share or 0.0, _MAX_SHARE)
        total = _total(event)
        status = [f"{event.done} of {total} trials{_time_left(event, ', ')}"]
        if event.best:
            rate = rate_text(event.best.throughput)
            status.append(f"best: {rate} samples/s ({self._levels(event.best)})")
        status.append(f"{trial}: {event.progress.phase}")
        self._bar.update(
            self._task,
            total=max(1, total),
            completed=event.done + share,
            status=" · ".join(status),
        )

    def block_flagged(self, block: BlockJudged) -> None:
        from stepscope.report.study.messages import block_reasons

        reasons = "; ".join(block_reasons(block))
        action = "will be rerun" if self._design.reruns else "will not be rerun"
        self.notify(f"block {block.number} was affected by interference and {action}: {reasons}")

    def trial_finished(self, result: Result, event: ProgressEvent) -> None:
        if self._quiet or self._bar is not None:
            return
        trial = "reference trial" if result.is_reference else self._levels(result)
        attempt = f", attempt {result.attempt}" if result.attempt > 1 else ""
        outcome = f"{result.outcome.value}: {result.reason}"
        if result.is_ok:
            outcome = f"{rate_text(result.throughput)} samples/s"
            if result.interference:
                from stepscope.report.study.messages import interference_text

                reasons = "; ".join(map(interference_text, result.interference))
                outcome += f" (interference: {reasons})"
        left = _time_left(event, " · ")
        self.notify(f"[{event.done}/{_total(event)}] {trial}{attempt}: {outcome}{left}")

    def _levels(self, result: Result) -> str:
        from stepscope.studies.trial_spec import levels_text, setting

        names = [factor.name for factor in self._design.factors]
        levels = {name: setting(result.settings, name) for name in names}
        return levels_text(levels) or str(result.settings.get("model", ""))


def _total(event: ProgressEvent) -> int:
    return event.done + (event.remaining or 0)


def _time_left(event: ProgressEvent, separator: str) -> str:
    seconds = event.remaining_s
    return f"{separator}about {seconds_text(seconds)} left" if seconds else ""
