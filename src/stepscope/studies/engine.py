"""Runs the trials that a planner proposes, each once, in blocks that start with a reference trial.

A trial is claimed (by a file that only one process can create), run by the launcher into its own
folder, measured, and written to the ledger. If the process is killed between two of these steps,
the claim or the folder shows how far it came, and the next `study run` resumes from there.

Blocks, reference trials and drift belong to one machine: a launcher with several machines has one
open block on each.
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
from stepscope.errors import TrialError, WorkloadError
from stepscope.inject.masking import mask_text
from stepscope.records import Outcome
from stepscope.records.trial import StudyPlace, TrialFacts
from stepscope.runs.files import write_json
from stepscope.runs.paths import RunPaths
from stepscope.studies.design.records import Design
from stepscope.studies.estimate import TrialDurations
from stepscope.studies.folder import Ledger, StudyPaths, StudyProgress, claim, write_error
from stepscope.studies.launchers.contract import FinishedTrial, Job, Launcher
from stepscope.studies.measure import MeasuredTrial, measure_trial
from stepscope.studies.planner import Planner
from stepscope.studies.results import REFERENCE, Attempt, Result, Results, Role
from stepscope.studies.scan import DAMAGED
from stepscope.studies.trial_spec import TrialSpec, resolved, trial_text, with_setting_names
from stepscope.trials.heartbeat import Progress
from stepscope.trials.noise import MachineKind, NoiseStore
from stepscope.trials.request import TrialRequest
from stepscope.trials.runner import uninterrupted

if TYPE_CHECKING:
    from stepscope.studies.study import ScannedStudy

MAX_FAILURES = 3
"""Configurations in a row that may fail before the study stops."""

_WRITE_INTERVAL_S = 1.0
_NO_PROGRESS = Progress("starting", 0, None, None, None, 0.0, 0.0)

StopReason = Literal["done", "budget", "interrupted"]


@dataclass(frozen=True)
class ProgressEvent:
    """The progress of a study while a trial runs."""

    spec: TrialSpec
    attempt: Attempt
    progress: Progress
    done: int
    remaining: int | None
    """Number of trials; None if the planner does not know it."""
    remaining_s: float | None
    best: Result | None


class ProgressListener(Protocol):
    """Receives the progress of a study."""

    def study_started(self, study: ScannedStudy) -> None:
        """The study is locked; no trial has been started yet."""

    def notify(self, text: str) -> None:
        """A message for the user."""

    def block_flagged(self, block: BlockJudged) -> None:
        """A block has interference or drift; called once for each flagged block."""

    def show(self, event: ProgressEvent) -> None:
        """Progress of the running trial, several times a second."""

    def trial_finished(self, result: Result, event: ProgressEvent) -> None:
        """A trial has finished."""


class SilentListener:
    """A listener that ignores everything."""

    def study_started(self, study: ScannedStudy) -> None: ...

    def notify(self, text: str) -> None: ...

    def block_flagged(self, block: BlockJudged) -> None: ...

    def show(self, event: ProgressEvent) -> None: ...

    def trial_finished(self, result: Result, event: ProgressEvent) -> None: ...


@dataclass
class _RunningTrial:
    spec: TrialSpec
    attempt: Attempt
    blank: Result
    """The result without its measurements."""
    started_ns: int = field(default_factory=time.monotonic_ns)


@dataclass
class _Block:
    """The open block of a machine."""

    number: int = 0
    trials: int = 0
    failed_references: int = 0
    """Reference trials in a row that failed."""


@dataclass
class Engine:
    """One `study run`: runs trials until the plan is finished or the budget is used up."""

    paths: StudyPaths
    planner: Planner
    launcher: Launcher
    results: Results
    listener: ProgressListener
    design: Design
    reference: TrialSpec | None
    launched: int = 0
    """Trials that were started, including reference trials."""

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.paths)
        self._durations = TrialDurations(self.results.results)
        self._running: dict[Path, _RunningTrial] = {}
        self._blocks = {machine: _Block() for machine in self.launcher.machines}
        self._last_block = self.results.last_block
        self._failures: set[str] = set()
        self._crashes: set[str] = set()
        self._done = 0
        self._remaining: int | None = None
        self._remaining_s: float | None = None
        self._best: Result | None = None
        self._refusal: WorkloadError | None = None
        judged = self.results.judged
        self._reported_blocks = {number for number in judged if judged[number].flagged}
        self._next_write = 0.0

    def run(self) -> StopReason:
        """Run trials until none is proposed, the budget is used up, or a signal arrives."""
        self._update_estimates()
        try:
            with self.launcher:
                while True:
                    within_budget = self._fill()
                    if not self._running:
                        self._raise_if_nothing_ran(refused=1)
                        return "done" if within_budget else "budget"
                    is_termination_requested = False
                    for finished in self.launcher.wait(self._show):
                        with uninterrupted() as signals:
                            self._finish(finished)
                        is_termination_requested |= finished.termination_requested or bool(signals)
                    if is_termination_requested:
                        return "interrupted"
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            for trial in self._running.values():
                self._unclaim(trial)

    def _fill(self) -> bool:
        """Start trials in all free slots; return False if the budget is used up."""
        for machine, slots in self.launcher.machines.items():
            block = self._blocks[machine]
            while True:
                here = [each for each in self._running.values() if each.blank.machine == machine]
                if len(here) >= slots or any(each.attempt.is_reference for each in here):
                    break
                running = {(each.spec.key, each.attempt.repeat) for each in self._running.values()}
                proposals = self.planner.next(self.results)
                new = (each for each in proposals if (each.spec.key, each.repeat) not in running)
                proposed = next(new, None)
                if proposed is None:
                    return True
                if not self._is_affordable(proposed.spec):
                    return False
                # A resumed study opens a new block, because time has passed.
                if block.number == 0 or block.trials >= self.design.block:
                    has_reference = self.reference is not None and block.failed_references < 2
                    if here and has_reference:
                        break  # a reference trial runs alone on its machine
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
        self.results.add_attempt(attempt)
        try:
            if not claim(self.paths, attempt, spec.settings):
                if not attempt.is_reference:
                    self.results.claimed_by_others.add((spec.key, repeat))
                return False
        except OSError as error:
            raise write_error(self.paths, error) from None
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
            started=time.time(),
            machine=machine,
        )
        self._running[job.folder] = _RunningTrial(spec, attempt, blank)
        self.launched += 1
        self.launcher.start(job)
        return True

    def _unclaim(self, trial: _RunningTrial) -> None:
        """Remove the claim of a trial that was never started."""
        if not self.paths.run(trial.attempt.place).exists():
            self.paths.claim(trial.attempt.place).unlink(missing_ok=True)

    def _finish(self, finished: FinishedTrial) -> None:
        """Record the result of a trial; raise an error if the study cannot continue."""
        trial = self._running.pop(finished.job.folder)
        if isinstance(finished.error, WorkloadError):
            self._refuse(trial, finished.error)
            return
        result, measured = self._measure(finished, trial)
        self._ledger.add(result)
        self.results.add(result)
        self._durations.add(result)
        if measured and result.is_trial and result.is_ok:
            # A failure to store the noise must not stop the study.
            with contextlib.suppress(*DAMAGED):
                self._learn_noise(trial.spec, measured)
        self._update_estimates()
        self.listener.trial_finished(result, self._event(trial, _NO_PROGRESS))
        if result.is_reference and result.is_result:
            block = self._blocks[trial.blank.machine]
            block.failed_references = 0 if result.is_ok else block.failed_references + 1
            if block.failed_references == 2:
                self.listener.notify(
                    f"the reference trial failed ({result.outcome.value}): the study continues "
                    "without a reference trial. Choose a smaller one in the design with "
                    "`blocks: {reference: …}`"
                )
        for number, judged in self.results.judged.items():
            if judged.flagged and number not in self._reported_blocks:
                self._reported_blocks.add(number)
                self.listener.block_flagged(judged)
        self._raise_if_hopeless(result, finished)

    def _measure(
        self, finished: FinishedTrial, trial: _RunningTrial
    ) -> tuple[Result, MeasuredTrial | None]:
        seconds = (time.monotonic_ns() - trial.started_ns) / 1e9
        reason = mask_text(str(finished.error or ""))
        blank = replace(trial.blank, reason=reason, seconds=seconds)
        if finished.error is not None:
            return blank, None
        try:
            measured = measure_trial(finished.job.folder, blank)
            return measured.result, measured
        except DAMAGED as error:  # the run is incomplete, for example because the disk is full
            return replace(blank, reason=getattr(error, "message", str(error))), None

    def _learn_noise(self, spec: TrialSpec, measured: MeasuredTrial) -> None:
        """Store the noise between the repeats of a configuration once all of them have answers."""
        repeats = range(1, self.design.repeats + 1)
        answers = [self.results.answer(spec.key, repeat) for repeat in repeats]
        rates = [
            answer.throughput
            for answer in answers
            if answer and answer.is_ok and answer.throughput
            if not self.results.has_interference(answer)
        ]
        if None in answers or len(rates) < 2:
            return
        request = TrialRequest(resolved(spec.workload, self.design.base), spec.limits)
        machine = MachineKind.of(measured.environment, measured.device, request.noise_key)
        NoiseStore(notify=self.listener.notify).learn(machine, rates)

    def _refuse(self, trial: _RunningTrial, error: WorkloadError) -> None:
        """Skip an invalid workload for the rest of this run."""
        self.results.refused[trial.spec.key] = with_setting_names(error.message.partition("\n")[0])
        self._refusal = error
        self._unclaim(trial)
        why = with_setting_names(str(error).partition("\n")[0])
        name = trial_text(trial.spec, self.design.factors)
        self.listener.notify(f"{name} is skipped: {why}")
        if trial.attempt.is_reference:
            self.reference = None
        self._update_estimates()
        self._raise_if_nothing_ran(MAX_FAILURES)

    def _raise_if_nothing_ran(self, refused: int) -> None:
        """Raise the last refusal if `refused` configurations were refused and none ever ran."""
        nothing_ran = not any(result.is_result for result in self.results.results)
        if self._refusal and nothing_ran and len(self.results.refused) >= refused:
            raise self._refusal

    def _raise_if_hopeless(self, result: Result, finished: FinishedTrial) -> None:
        if finished.leftovers:
            raise TrialError(
                "The next trial was not started because the previous one was not cleaned up "
                "completely: "
                f"{'; '.join(finished.leftovers)}",
                "Stop these processes and remove these files, then run the study again to resume",
            )
        if result.infrastructure:
            self._failures.add(result.key)
            if len(self._failures) >= MAX_FAILURES:
                raise TrialError(
                    f"{len(self._failures)} configurations in a row failed for an external reason; "
                    f"the last one: {with_setting_names(result.reason)}",
                    "Fix the cause, then run the study again to resume",
                )
            return
        self._failures.clear()
        if result.outcome is Outcome.CRASHED:
            self._crashes.add(result.key)
        # If none has trained, the code is the cause and not the settings.
        none_trained = not any(each.is_ok for each in self.results.results)
        if len(self._crashes) >= MAX_FAILURES and none_trained:
            raise WorkloadError(
                f"{len(self._crashes)} configurations crashed and none has trained: "
                f"{result.reason} ({RunPaths(self.paths.run(result.place)).stderr_log})",
                "Fix the code, then run the study with --retry-failed",
            )

    def _update_estimates(self) -> None:
        remaining = self.planner.remaining(self.results)
        if remaining is not None:
            self._remaining = len(remaining)
            self._remaining_s = self._durations.total(each.spec for each in remaining)
            references = len(remaining) // self.design.block
            if self._remaining_s is not None and references and self.reference:
                self._remaining_s += references * (self._durations.of(self.reference) or 0.0)
        trials = [result for result in self.results.results if result.is_trial]
        keys = {(result.key, result.repeat) for result in trials}
        self._done = sum(self.results.answer(*trial) is not None for trial in keys)
        good = [result for result in trials if result.is_ok and result.throughput]
        self._best = max(good, key=lambda result: result.throughput or 0.0, default=None)

    def _show(self, job: Job, progress: Progress) -> None:
        """Pass progress to the listener, and write it to the file that `study show` reads."""
        trial = self._running[job.folder]
        self.listener.show(self._event(trial, progress))
        now = time.monotonic()
        if now < self._next_write:
            return
        self._next_write = now + _WRITE_INTERVAL_S
        name = trial_text(trial.spec, self.design.factors)
        current = StudyProgress(os.getpid(), time.time(), name, progress.phase, progress.share)
        try:
            write_json(self.paths.now, current, indent=None)
        except OSError:
            self._next_write = math.inf  # a full disk: the study continues without the file

    def _event(self, trial: _RunningTrial, progress: Progress) -> ProgressEvent:
        remaining_s = self._remaining_s
        if remaining_s is not None:
            remaining_s = max(0.0, remaining_s - progress.elapsed_s)
        return ProgressEvent(
            spec=trial.spec,
            attempt=trial.attempt,
            progress=progress,
            done=self._done,
            remaining=self._remaining,
            remaining_s=remaining_s,
            best=self._best,
        )
