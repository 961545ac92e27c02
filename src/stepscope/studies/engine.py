"""Runs what a planner proposes, each trial once, in blocks that begin with a reference trial.

A trial is claimed (a file that only one process can make), run by the launcher into its own folder,
measured, and written to the ledger. A process that is killed between any two of these leaves a
claim or a folder that tells how far it came, and the next `study run` goes on from there.

Blocks, reference trials and drift belong to one machine: a launcher with several machines has a
block open on each.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from stepscope.analysis.study.drift import BlockJudged
from stepscope.errors import BadWorkload, CannotTry
from stepscope.records import Outcome
from stepscope.records.trial import StudyPlace, TrialFacts
from stepscope.runs.paths import RunPaths, write_json
from stepscope.studies.design.records import Design
from stepscope.studies.estimate import TrialDurations
from stepscope.studies.folder import Ledger, StudyPaths, StudyProgress, claim, unwritable
from stepscope.studies.launchers.contract import FinishedTrial, Job, Launcher
from stepscope.studies.measure import MeasuredTrial, measure_trial
from stepscope.studies.planner import Planner
from stepscope.studies.results import REFERENCE, Attempt, Result, Results, Role
from stepscope.studies.scan import DAMAGED
from stepscope.studies.trial_spec import TrialSpec, in_design_words, resolved, trial_text
from stepscope.trials.heartbeat import Progress
from stepscope.trials.noise import MachineKind, NoiseStore
from stepscope.trials.request import TrialRequest
from stepscope.trials.runner import uninterrupted

if TYPE_CHECKING:
    from stepscope.studies.study import ScannedStudy

MOST_FAILURES = 3
"""Configurations in a row that failed for something around them: it will not get better."""

_WRITTEN_EVERY_S = 1.0
_NOTHING_YET = Progress("starting", 0, None, None, None, 0.0, 0.0)

StopReason = Literal["done", "budget", "interrupted"]


@dataclass(frozen=True)
class ProgressEvent:
    """How far a study is."""

    spec: TrialSpec
    attempt: Attempt
    progress: Progress
    done: int
    to_come: int | None
    """None where the planner cannot say."""
    left_s: float | None
    best: Result | None


class ProgressListener(Protocol):
    """Hears how a study goes."""

    def begins(self, study: ScannedStudy) -> None:
        """Nobody else runs it, and nothing was started yet."""

    def tell(self, text: str) -> None:
        """Something a user should know."""

    def disturbed(self, block: BlockJudged) -> None:
        """A block turned out to be disturbed; called once for each."""

    def show(self, moment: ProgressEvent) -> None:
        """Several times a second, while a trial runs."""

    def over(self, result: Result, moment: ProgressEvent) -> None:
        """A trial is over."""


class SilentListener:
    def begins(self, study: ScannedStudy) -> None: ...

    def tell(self, text: str) -> None: ...

    def disturbed(self, block: BlockJudged) -> None: ...

    def show(self, moment: ProgressEvent) -> None: ...

    def over(self, result: Result, moment: ProgressEvent) -> None: ...


@dataclass
class _RunningTrial:
    spec: TrialSpec
    attempt: Attempt
    blank: Result
    """What is known of its result before it is over."""
    began_ns: int = field(default_factory=time.monotonic_ns)


@dataclass
class _Block:
    """The block that is open on a machine."""

    number: int = 0
    trials: int = 0
    failed_references: int = 0
    """In a row."""


@dataclass
class Engine:
    """One `study run`: from the results so far to the end of the plan or of the budget."""

    paths: StudyPaths
    planner: Planner
    launcher: Launcher
    results: Results
    listener: ProgressListener
    design: Design
    reference: TrialSpec | None
    launched: int = 0
    """Trials that were begun, reference trials among them."""

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.paths)
        self._durations = TrialDurations(self.results.results)
        self._running: dict[Path, _RunningTrial] = {}
        self._blocks = {machine: _Block() for machine in self.launcher.machines}
        self._last_block = self.results.last_block
        self._failures: set[str] = set()
        self._crashes: set[str] = set()
        self._done = 0
        self._to_come: int | None = None
        self._left_s: float | None = None
        self._best: Result | None = None
        self._refusal: BadWorkload | None = None
        judged = self.results.judged
        self._reported_blocks = {number for number in judged if judged[number].flagged}
        self._next_written = 0.0

    def run(self) -> StopReason:
        """Until nothing is proposed, the budget is used up, or a signal asks for the end."""
        self._look_ahead()
        try:
            with self.launcher:
                while True:
                    within_budget = self._fill()
                    if not self._running:
                        self._raise_if_nothing_ran(refused=1)
                        return "done" if within_budget else "budget"
                    is_asked_to_end = False
                    for finished in self.launcher.wait(self._show):
                        with uninterrupted() as signals:
                            self._settle(finished)
                        is_asked_to_end |= finished.asked_to_end or bool(signals)
                    if is_asked_to_end:
                        return "interrupted"
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            for trial in self._running.values():
                self._unclaim(trial)

    def _fill(self) -> bool:
        """Start trials on all free slots; False if the budget is what keeps us from more."""
        for machine, slots in self.launcher.machines.items():
            block = self._blocks[machine]
            while True:
                here = [each for each in self._running.values() if each.blank.machine == machine]
                if len(here) >= slots or any(each.attempt.is_reference for each in here):
                    break
                running = {(each.spec.key, each.attempt.repeat) for each in self._running.values()}
                wanted = self.planner.next(self.results)
                new = (each for each in wanted if (each.spec.key, each.repeat) not in running)
                proposed = next(new, None)
                if proposed is None:
                    return True
                if not self._is_affordable(proposed.spec):
                    return False
                # The first trial opens a block, also when a study goes on: time has passed.
                if block.number == 0 or block.trials >= self.design.block:
                    has_reference = self.reference is not None and block.failed_references < 2
                    if here and has_reference:
                        break  # a reference trial has its machine for itself
                    self._last_block += 1
                    block.number, block.trials = self._last_block, 0
                    if self.reference is not None and has_reference:
                        number = self.results.references + 1
                        self._launch(self.reference, REFERENCE, number, machine)
                        continue
                if self._launch(proposed.spec, "trial", proposed.repeat, machine):
                    block.trials += 1
        return True

    def _is_affordable(self, spec: TrialSpec) -> bool:
        budget, results = self.design.budget, self.results
        if budget.trials is not None and results.tried + len(self._running) >= budget.trials:
            return False
        if budget.seconds is None:
            return True
        expected = self._durations.of(spec) if self._durations.is_measured else None
        return results.seconds + (expected or 0.0) < budget.seconds

    def _launch(self, spec: TrialSpec, role: Role, repeat: int, machine: str) -> bool:
        number = self.results.next_attempt(spec.key, role, repeat)
        attempt = Attempt(spec.key, role, repeat, number)
        self.results.begun(attempt)
        try:
            if not claim(self.paths, attempt, spec.settings):
                if not attempt.is_reference:
                    self.results.claimed_by_others.add((spec.key, repeat))
                return False
        except OSError as error:
            raise unwritable(self.paths, error) from None
        block = self._blocks[machine].number
        place = StudyPlace(
            name=self.design.name,
            key=spec.key,
            role=role,
            settings=dict(spec.settings),
            attempt=number,
            block=block,
            machine=machine,
        )
        gpus = spec.get("gpus")
        job = Job(
            workload=resolved(spec.workload, self.design.base),
            limits=spec.limits,
            folder=self.paths.run(attempt.place),
            name=spec.workload.short_name,
            facts=TrialFacts(
                command=tuple(spec.command()),
                repeat=repeat,
                repeats=max(self.design.repeats, repeat),
                study=place,
            ),
            machine=machine,
            gpu_count=gpus if isinstance(gpus, int) else None,
        )
        blank = Result(
            key=spec.key,
            settings=spec.settings,
            role=role,
            repeat=repeat,
            attempt=number,
            block=block,
            outcome=Outcome.CRASHED,
            infrastructure=True,
            began=time.time(),
            machine=machine,
        )
        self._running[job.folder] = _RunningTrial(spec, attempt, blank)
        self.launched += 1
        self.launcher.start(job)
        return True

    def _unclaim(self, trial: _RunningTrial) -> None:
        """What was claimed and never begun leaves no trace."""
        if not self.paths.run(trial.attempt.place).exists():
            self.paths.claim(trial.attempt.place).unlink(missing_ok=True)

    def _settle(self, finished: FinishedTrial) -> None:
        """Write down how a trial ended, and decide what that means for the others."""
        trial = self._running.pop(finished.job.folder)
        if isinstance(finished.error, BadWorkload):
            self._refuse(trial, finished.error)
            return
        result, measured = self._measure(finished, trial)
        self._ledger.add(result)
        self.results.add(result)
        self._durations.add(result)
        if measured and result.is_trial and result.is_ok:
            # What repeats teach is not worth a study: where it cannot be kept, it is not.
            with contextlib.suppress(*DAMAGED):
                self._learn_noise(trial.spec, measured)
        self._look_ahead()
        self.listener.over(result, self._event(trial, _NOTHING_YET))
        if result.is_reference and result.is_result:
            block = self._blocks[trial.blank.machine]
            block.failed_references = 0 if result.is_ok else block.failed_references + 1
            if block.failed_references == 2:
                self.listener.tell(
                    f"The sentinel does not train ({result.outcome.value}): the study goes on "
                    "without. Name a lighter one in the design, under `blocks: {sentinel: …}`"
                )
        for number, judged in self.results.judged.items():
            if judged.flagged and number not in self._reported_blocks:
                self._reported_blocks.add(number)
                self.listener.disturbed(judged)
        self._raise_if_hopeless(result, finished)

    def _measure(
        self, finished: FinishedTrial, trial: _RunningTrial
    ) -> tuple[Result, MeasuredTrial | None]:
        seconds = (time.monotonic_ns() - trial.began_ns) / 1e9
        blank = replace(trial.blank, reason=str(finished.error or ""), seconds=seconds)
        if finished.error is not None:
            return blank, None
        try:
            measured = measure_trial(finished.job.folder, blank)
            return measured.result, measured
        except DAMAGED as error:  # it could not write down how it ended: a full disk
            return replace(blank, reason=getattr(error, "message", str(error))), None

    def _learn_noise(self, spec: TrialSpec, measured: MeasuredTrial) -> None:
        """Keep how much the repeats of a configuration differ, once the last has its answer."""
        repeats = range(1, self.design.repeats + 1)
        answers = [self.results.answer(spec.key, repeat) for repeat in repeats]
        rates = [
            answer.throughput
            for answer in answers
            if answer and answer.is_ok and answer.throughput
            if not self.results.is_disturbed(answer)
        ]
        if None in answers or len(rates) < 2:
            return
        request = TrialRequest(resolved(spec.workload, self.design.base), spec.limits)
        machine = MachineKind.of(measured.environment, measured.device, request.noise_key)
        NoiseStore(tell=self.listener.tell).learn(machine, rates)

    def _refuse(self, trial: _RunningTrial, error: BadWorkload) -> None:
        """It is not a workload on this machine: left out until the study is run again."""
        self.results.refused[trial.spec.key] = in_design_words(error.message.partition("\n")[0])
        self._refusal = error
        self._unclaim(trial)
        why = in_design_words(str(error).partition("\n")[0])
        name = trial_text(trial.spec, self.design.factors)
        self.listener.tell(f"{name} is left out: {why}")
        if trial.attempt.is_reference:
            self.reference = None
        self._look_ahead()
        self._raise_if_nothing_ran(MOST_FAILURES)

    def _raise_if_nothing_ran(self, refused: int) -> None:
        """Where that many were refused and none was ever run, it is the workload of all."""
        nothing_ran = not any(result.is_result for result in self.results.results)
        if self._refusal and nothing_ran and len(self.results.refused) >= refused:
            raise self._refusal

    def _raise_if_hopeless(self, result: Result, finished: FinishedTrial) -> None:
        if finished.left:
            raise CannotTry(
                f"The next trial was not started: {'; '.join(finished.left)} is left of the last "
                "one",
                "End it, then run the study again: it goes on from here",
            )
        if result.infrastructure:
            self._failures.add(result.key)
            if len(self._failures) >= MOST_FAILURES:
                raise CannotTry(
                    f"{len(self._failures)} configurations in a row failed for something around "
                    f"them, the last one: {in_design_words(result.reason)}",
                    "Mend that, then run the study again: it goes on from here",
                )
            return
        self._failures.clear()
        if result.outcome is Outcome.CRASHED:
            self._crashes.add(result.key)
        # Where none has ever trained, it is the code and not the settings.
        none_trained = not any(each.is_ok for each in self.results.results)
        if len(self._crashes) >= MOST_FAILURES and none_trained:
            raise BadWorkload(
                f"The first {len(self._crashes)} configurations crashed, and none has trained: "
                f"{result.reason} ({RunPaths(self.paths.run(result.place)).stderr_log})",
                "Mend it, then run the study with --again: it tries again what crashed",
            )

    def _look_ahead(self) -> None:
        to_come = self.planner.to_come(self.results)
        if to_come is not None:
            self._to_come = len(to_come)
            self._left_s = self._durations.total(each.spec for each in to_come)
            references = len(to_come) // self.design.block
            if self._left_s is not None and references and self.reference:
                self._left_s += references * (self._durations.of(self.reference) or 0.0)
        trials = [result for result in self.results.results if result.is_trial]
        keys = {(result.key, result.repeat) for result in trials}
        self._done = sum(self.results.answer(*trial) is not None for trial in keys)
        good = [result for result in trials if result.is_ok and result.throughput]
        self._best = max(good, key=lambda result: result.throughput or 0.0, default=None)

    def _show(self, job: Job, progress: Progress) -> None:
        """To the listener, and about every second to the file that `study show` reads."""
        trial = self._running[job.folder]
        self.listener.show(self._event(trial, progress))
        now = time.monotonic()
        if now < self._next_written:
            return
        self._next_written = now + _WRITTEN_EVERY_S
        name = trial_text(trial.spec, self.design.factors)
        written = StudyProgress(os.getpid(), time.time(), name, progress.phase, progress.share)
        try:
            write_json(self.paths.now, written, indent=None)
        except OSError:
            self._next_written = math.inf  # a full disk: the study goes on without

    def _event(self, trial: _RunningTrial, progress: Progress) -> ProgressEvent:
        left = None if self._left_s is None else max(0.0, self._left_s - progress.elapsed_s)
        return ProgressEvent(
            spec=trial.spec,
            attempt=trial.attempt,
            progress=progress,
            done=self._done,
            to_come=self._to_come,
            left_s=left,
            best=self._best,
        )
