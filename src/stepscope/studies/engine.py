"""Runs what a planner wants, exactly once, in blocks that begin with the sentinel.

The life of a trial here: claimed (a file that only one can make), run by the launcher into its own
folder, measured, written to the ledger. Whoever is killed between any two of these leaves a claim
or a folder that tells how far it came, and the next `study run` goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from stepscope.errors import BadWorkload, CannotTry
from stepscope.records import Outcome
from stepscope.studies.design import Design
from stepscope.studies.estimate import Pace
from stepscope.studies.folder import DAMAGED, Attempt, Ledger, StudyPaths, take, unwritable
from stepscope.studies.here import Here
from stepscope.studies.known import Known
from stepscope.studies.launchers.contract import Job, Launcher, Over
from stepscope.studies.measure import result_of
from stepscope.studies.planner import Planner, Wanted
from stepscope.studies.result import Result, Role
from stepscope.studies.spec import Spec, in_design_words, levels_text, resolved
from stepscope.studies.teach import teach
from stepscope.trials.interrupts import uninterrupted
from stepscope.trials.pulse import Progress
from stepscope.workloads.spec import option_name

if TYPE_CHECKING:
    from stepscope.studies.study import Study

MOST_FAILURES = 3
"""So many configurations in a row that failed for something around them: it will not get better."""

Why = Literal["done", "budget", "interrupted"]


@dataclass(frozen=True)
class Moment:
    """How far a study is, for who watches it."""

    spec: Spec
    role: Role
    repeat: int
    progress: Progress
    done: int
    to_come: int
    left_s: float | None
    best: Result | None
    block: int


class Onlooker(Protocol):
    """Who is told how a study goes."""

    def begins(self, study: Study) -> None:
        """Nobody else runs it, and nothing was started yet."""
        ...

    def tell(self, text: str) -> None:
        """Something a user should know."""
        ...

    def show(self, moment: Moment) -> None:
        """Several times a second, while a trial runs."""
        ...

    def over(self, result: Result, moment: Moment) -> None:
        """A trial is over."""
        ...


@dataclass
class _Flight:
    """A trial that runs."""

    spec: Spec
    attempt: Attempt
    block: int
    began: float = field(default_factory=time.time)
    began_ns: int = field(default_factory=time.monotonic_ns)


class Engine:
    """One `study run`, from what was known before to the end of the plan or of the budget."""

    def __init__(
        self,
        paths: StudyPaths,
        design: Design,
        planner: Planner,
        launcher: Launcher,
        known: Known,
        onlooker: Onlooker,
        sentinel: Spec | None = None,
        here: Here | None = None,
    ) -> None:
        self._paths = paths
        self._design = design
        self._planner = planner
        self._launcher = launcher
        self._known = known
        self._onlooker = onlooker
        self._sentinel = sentinel
        self._here = here or Here.look()
        self._ledger = Ledger(paths)
        self._base = design.file.parent if design.file else Path()
        self._pace = Pace(known.results)
        self._flights: dict[Path, _Flight] = {}
        self._block = known.last_block
        self._in_block = design.block  # the first trial opens a block: time has passed
        self._failures: set[str] = set()
        self._crashes: set[str] = set()
        self._done = self._to_come = 0
        self._left_s: float | None = None
        self._best: Result | None = None
        self._failed_sentinels = 0
        self._refusal: BadWorkload | None = None
        self._told = {number for number, judged in known.judged.items() if judged.flagged}
        self.launched = 0
        """Trials that were begun, sentinels among them."""

    def run(self) -> Why:
        """Until nothing is wanted any more, the budget is used up, or somebody asks for the end."""
        self._look_ahead()
        try:
            with self._launcher:
                return self._run()
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            for flight in self._flights.values():
                self._unclaim(flight)

    def _unclaim(self, flight: _Flight) -> None:
        """What was claimed and never begun is as if nothing had been."""
        if not self._paths.run(flight.attempt.place).exists():
            self._paths.claim(flight.attempt.place).unlink(missing_ok=True)

    def _run(self) -> Why:
        while True:
            within = self._fill()
            if not self._flights:
                self._stop_if_no_workload(1)
                return "done" if within else "budget"
            for over in self._launcher.wait(self._show):
                with uninterrupted() as heard:
                    self._settle(over)
                if over.asked_to_end or heard:
                    return "interrupted"

    def _fill(self) -> bool:
        """Start as many as the launcher takes; False if the budget is what keeps us from more."""
        while len(self._flights) < self._launcher.slots:
            wanted = next(self._wanted(), None)
            if wanted is None:
                return True
            if not self._affordable(wanted.spec):
                return False
            if self._in_block >= self._design.block:
                self._block += 1
                self._in_block = 0
                if self._sentinel is not None:
                    self._launch(self._sentinel, "sentinel", self._known.sentinels + 1)
                    continue
            if self._launch(wanted.spec, "trial", wanted.repeat):
                self._in_block += 1
        return True

    def _wanted(self) -> Iterator[Wanted]:
        under_way = {(f.attempt.key, f.attempt.repeat) for f in self._flights.values()}
        for wanted in self._planner.next(self._known):
            if (wanted.spec.key, wanted.repeat) not in under_way:
                yield wanted

    def _affordable(self, spec: Spec) -> bool:
        budget, known = self._design.budget, self._known
        if budget.trials is not None:
            tried = sum(result.role == "trial" and result.is_result for result in known.results)
            if tried + len(self._flights) >= budget.trials:
                return False
        if budget.seconds is None:
            return True
        expected = self._pace.of(spec) if self._pace.is_measured else None
        return known.seconds + (expected or 0.0) < budget.seconds

    def _launch(self, spec: Spec, role: Role, repeat: int) -> bool:
        number = self._known.next_attempt(spec.key, role, repeat)
        attempt = Attempt(spec.key, role, repeat, number)
        self._known.begun(spec.key, role, repeat, number)
        try:
            if not take(self._paths, attempt, spec.settings):
                if role == "trial":
                    self._known.elsewhere.add((spec.key, repeat))
                return False
        except OSError as error:
            raise unwritable(self._paths, error) from None
        job = Job(
            resolved(spec.workload, self._base),
            self._here.limits(spec),
            self._paths.run(attempt.place),
            spec.workload.short_name,
            self._facts(spec, attempt),
        )
        self._flights[job.folder] = _Flight(spec, attempt, self._block)
        self.launched += 1
        self._launcher.start(job)
        return True

    def _facts(self, spec: Spec, attempt: Attempt) -> dict[str, Any]:
        return {
            "command": trial_command(spec),
            "repeat": attempt.repeat,
            "repeats": max(self._design.repeats, attempt.repeat),
            "study": {
                "name": self._design.name,
                "key": spec.key,
                "settings": dict(spec.settings),
                "role": attempt.role,
                "attempt": attempt.number,
                "block": self._block,
            },
        }

    def _settle(self, over: Over) -> None:
        """Write down how a trial ended, and think about what that means for the others."""
        flight = self._flights.pop(over.job.folder)
        if isinstance(over.error, BadWorkload):
            self._refuse(flight, over.error)
            return
        result = self._result(over, flight)
        self._ledger.add(result)
        self._known.add(result)
        self._pace.add(result)
        self._learn(flight.spec, result)
        self._look_ahead()
        self._onlooker.over(result, self._moment(flight, _NOTHING_YET))
        self._judge_sentinel(result)
        self._tell_disturbed()
        self._stop_if_hopeless(result, over)

    def _learn(self, spec: Spec, result: Result) -> None:
        """What repeats teach is not worth a study: where it cannot be kept, it is not."""
        if result.role == "trial" and result.is_ok:
            last = self._paths.run(result.place)
            with contextlib.suppress(*DAMAGED):
                teach(self._known, spec, self._design.repeats, last, self._onlooker.tell)

    def _result(self, over: Over, flight: _Flight) -> Result:
        attempt = flight.attempt
        blank = Result(
            attempt.key,
            flight.spec.settings,
            attempt.role,
            attempt.repeat,
            attempt.number,
            flight.block,
            Outcome.CRASHED,
            reason=str(over.error or ""),
            infrastructure=True,
            began=flight.began,
            seconds=(time.monotonic_ns() - flight.began_ns) / 1e9,
        )
        if over.error is not None:
            return blank
        try:
            return result_of(over.job.folder, blank)
        except DAMAGED as error:  # it could not write down how it ended: a full disk
            return replace(blank, reason=getattr(error, "message", str(error)))

    def _refuse(self, flight: _Flight, error: BadWorkload) -> None:
        """It is no workload here, whatever the reason: it is told now, and left out until the study
        is run again. The claim goes, as nothing was tried."""
        self._known.refused[flight.spec.key] = in_design_words(error.message.partition("\n")[0])
        self._refusal = error
        self._unclaim(flight)
        why = in_design_words(str(error).partition("\n")[0])
        self._onlooker.tell(f"{trial_text(flight.spec, self._design)} is left out: {why}")
        if flight.attempt.role == "sentinel":
            self._sentinel = None
        self._look_ahead()
        self._stop_if_no_workload(MOST_FAILURES)

    def _stop_if_no_workload(self, refused: int) -> None:
        """Where so many were refused and none was ever run, it is the workload of all."""
        nothing_ran = not any(result.is_result for result in self._known.results)
        if self._refusal and nothing_ran and len(self._known.refused) >= refused:
            raise self._refusal

    def _judge_sentinel(self, result: Result) -> None:
        if result.role != "sentinel" or not result.is_result:
            return
        self._failed_sentinels = 0 if result.is_ok else self._failed_sentinels + 1
        if self._failed_sentinels > 1:
            self._sentinel = None
            self._onlooker.tell(
                f"The sentinel does not train ({result.outcome.value}): the study goes on without. "
                "Name a lighter one in the design, under `blocks: {sentinel: …}`"
            )

    def _tell_disturbed(self) -> None:
        """Of every block once, when it turns out."""
        for number, judged in self._known.judged.items():
            if judged.flagged and number not in self._told:
                self._told.add(number)
                again = "it will be run again" if self._design.reruns else "it is not run again"
                self._onlooker.tell(
                    f"block {number} was disturbed: {'; '.join(judged.reasons)}: {again}"
                )

    def _stop_if_hopeless(self, result: Result, over: Over) -> None:
        if over.left:
            raise CannotTry(
                f"The next trial was not started: {'; '.join(over.left)} is left of the last one",
                "End it, then run the study again: it goes on from here",
            )
        if not result.infrastructure:
            self._failures.clear()
            self._stop_if_all_crash(result)
            return
        self._failures.add(result.key)
        if len(self._failures) >= MOST_FAILURES:
            raise CannotTry(
                f"{len(self._failures)} configurations in a row failed for something around them, "
                f"the last one: {in_design_words(result.reason)}",
                "Mend that, then run the study again: it goes on from here",
            )

    def _stop_if_all_crash(self, result: Result) -> None:
        """Where none has ever trained, it is the code and not the settings."""
        if result.outcome is Outcome.CRASHED:
            self._crashes.add(result.key)
        if len(self._crashes) < MOST_FAILURES or any(r.is_ok for r in self._known.results):
            return
        raise BadWorkload(
            f"The first {len(self._crashes)} configurations crashed, and none has trained: "
            f"{result.reason} ({self._paths.run(result.place)}/stderr.log)",
            "Mend it, then run the study with --again: it tries again what crashed",
        )

    def _look_ahead(self) -> None:
        """What is to come, and how long it will take."""
        wanted = [each.spec for each in self._planner.next(self._known)]
        self._to_come = len(wanted)
        sentinels = len(wanted) // self._design.block if self._sentinel else 0
        left = self._pace.total(wanted)
        if left is not None and sentinels and self._sentinel:
            left += sentinels * (self._pace.of(self._sentinel) or 0.0)
        self._left_s = left
        trials = {(r.key, r.repeat) for r in self._known.results if r.role == "trial"}
        self._done = sum(self._known.answer(*trial) is not None for trial in trials)
        good = [r for r in self._known.results if r.role == "trial" and r.is_ok and r.throughput]
        self._best = max(good, key=lambda result: result.throughput or 0.0, default=None)

    def _show(self, job: Job, progress: Progress) -> None:
        self._onlooker.show(self._moment(self._flights[job.folder], progress))

    def _moment(self, flight: _Flight, progress: Progress) -> Moment:
        left = self._left_s
        return Moment(
            flight.spec,
            flight.attempt.role,
            flight.attempt.repeat,
            progress,
            self._done,
            self._to_come,
            left if left is None else max(0.0, left - progress.elapsed_s),
            self._best,
            flight.block,
        )


_NOTHING_YET = Progress("starting", 0, None, None, None, 0.0, 0.0)


def trial_text(spec: Spec, design: Design) -> str:
    """A trial by the levels of its factors: `batch_size 32, cpus 1`."""
    levels = {factor.name: spec.get(factor.name) for factor in design.factors}
    return levels_text(levels) or spec.workload.short_name


def trial_command(spec: Spec) -> list[str]:
    """What would run the same trial alone."""
    words = ["stepscope", "trial", spec.workload.model]
    for name, value in spec.settings.items():
        if name == "model":
            continue
        if value is True:
            words.append(option_name(name))
        elif value is False:
            words.append(f"--no-{name.replace('_', '-')}")
        elif name == "gpus" and isinstance(value, int):
            words += ["--gpus", ",".join(map(str, range(value)))]
        else:
            words += [option_name(name), f"{value:g}" if isinstance(value, float) else str(value)]
    return words
