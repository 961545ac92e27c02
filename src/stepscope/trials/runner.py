"""Runs one trial: starts it, limits, monitors and judges it, and cleans up after it.

The trial's processes get a session and a process group of their own, so that a Ctrl-C in our
terminal reaches only us. If we die, the guard ends them. Whatever is left of a trial keeps the next
one from starting.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stepscope.capture.command import Reaper
from stepscope.capture.outcome import KernelEvidence
from stepscope.capture.request import RunRequest
from stepscope.capture.schedule import next_tick
from stepscope.capture.session import Session
from stepscope.capture.spawn import adoption, allow_many_descriptors, environment_of
from stepscope.errors import BadWorkload, CannotTry, CannotWatch, StepscopeError, TooFewSamples
from stepscope.records import Ending, Outcome
from stepscope.records.codec import dumps, to_json
from stepscope.records.facts import RunFacts
from stepscope.records.trial import RankFacts, TrialFacts
from stepscope.runs.masking import mask_text
from stepscope.runs.paths import RunPaths, replace_atomically
from stepscope.sensors import procfs
from stepscope.trials import child
from stepscope.trials.heartbeat import Heartbeat, Progress
from stepscope.trials.limits.fence import Fence
from stepscope.trials.noise import MachineKind, NoiseStore, device_kind
from stepscope.trials.outcome import Stopped, TrialEvidence, judge_trial
from stepscope.trials.processes import runner_process, stacks, trial_processes
from stepscope.trials.processes.guard import Guard
from stepscope.trials.processes.leftovers import Snapshot, check_clean, leftovers
from stepscope.trials.processes.runner_process import tail_of, uninterrupted, wait_until
from stepscope.trials.request import TrialRequest
from stepscope.workloads.datasets.locate import locate

PROFILED_STEPS = 5
_END_PATIENCE_S = 3.0
_STACKS_PATIENCE_S = 2.0
_ORPHAN_PATIENCE_S = 0.5
"""How long processes that outlive their trial's main one may take to leave by themselves."""
_BURIAL_S = 10.0
"""A process that was killed and has not ended by then is stuck in the kernel."""
_MEMORY_BURST_S = 0.5
"""The peak of host memory is a result here: reading it exactly may cost more than elsewhere."""
_WORTH_TELLING_S = 2.0


@dataclass(frozen=True)
class CompletedTrial:
    paths: RunPaths
    ending: Ending
    leftovers: list[str]  # what of it could not be cleaned up
    asked_to_end: bool = False
    """Whether a Ctrl-C came, perhaps when it was over already: no other should follow."""


def run_trial(
    request: TrialRequest,
    token: str,
    guard: Guard,
    tell: Callable[[str], None],
    show: Callable[[Progress], None] = lambda progress: None,
) -> CompletedTrial:
    """One trial, from nothing to nothing. BadWorkload if the workload cannot be used.

    `token` begins with that of the guard, and no other trial has it.
    """
    workload = request.workload
    show(Progress("making data"))
    began = time.monotonic()
    place = None if workload.is_own else locate(workload)
    took = time.monotonic() - began
    if place is not None and place.generated and took > _WORTH_TELLING_S:
        tell(f"{workload.data_name} data was generated in {took:.0f} s, and will be used again")
    started_ns = time.monotonic_ns()  # generated data is not part of the trial
    for text in check_clean():
        tell(text)
    fence = Fence(request.limits, token, workload.ranks, workload.workers)
    try:
        for path in fence.group_paths():
            guard.tell_group(path)
        trial = TrialFacts(**request.facts, started_ns=started_ns)
        # What the user typed says more than what we start.
        command = tuple(trial.command)
        facts = RunFacts(command=command, workload=to_json(workload), trial=trial)
        run = RunRequest(
            request.name or workload.short_name,
            [sys.executable, "-m", child.__name__],
            request.interval,
            request.out,
            announce_hook=False,
            facts=facts,
            memory_burst_s=_MEMORY_BURST_S,
            folder=request.folder,
        )
        paths = _make_folder(request, run, fence)
        run = replace(run, command=[*run.command, str(paths.trial_spec)])
        with adoption, runner_process.own_descriptors():
            completed = _Trial(request, run, paths, fence, token, tell, show).run()
    finally:
        fence.close()
    error = completed.ending.evidence.get("bad_workload")
    if error:  # a model that does not exist is not a result: nothing is kept of it
        shutil.rmtree(paths.folder, ignore_errors=True)
        kind = TooFewSamples if error["type"] == TooFewSamples.__name__ else BadWorkload
        raise kind(error["message"], error["hint"])
    return completed


def run_repeats(
    request: TrialRequest,
    tell: Callable[[str], None],
    show: Callable[[int, Progress], None] = lambda number, progress: None,
) -> Iterator[CompletedTrial]:
    """The same trial several times in fresh processes, as they end. Stops where one was
    interrupted, or left something behind."""
    series = trial_processes.new_token()
    guard = Guard.start(series)
    # Until a trial is over and cleaned up after, its end is the guard's job.
    end_guard = guard.leave
    repeats = request.repeats
    try:
        for number in range(1, repeats + 1):
            facts = {**request.facts, "repeat": number, "repeats": repeats}
            token, end_guard = f"{series}.{number}", guard.leave
            each = replace(request, facts=facts)
            completed = run_trial(each, token, guard, tell, partial(show, number))
            end_guard = guard.dismiss
            yield completed
            if completed.asked_to_end:
                return
            if completed.leftovers and number < repeats:
                left = f"{'; '.join(completed.leftovers)} is left of this one"
                raise CannotTry(f"The next trial was not started: {left}", "End it, then try again")
    except StepscopeError:
        end_guard = guard.dismiss
        raise
    finally:
        end_guard()


def _make_folder(request: TrialRequest, run: RunRequest, fence: Fence) -> RunPaths:
    """The run folder with the specification that the trial's processes read, or nothing at all."""
    try:
        paths = run.make_folder()
    except CannotWatch as error:
        raise CannotTry(error.message, error.hint) from None
    spec = child.ChildSpec(
        workload=to_json(request.workload),
        threads=fence.threads,
        gpu_memory=request.limits.gpu_memory,
        profiled_steps=PROFILED_STEPS if request.profile else 0,
        cycle=request.cycle,
    )
    try:
        paths.trial.mkdir()
        replace_atomically(paths.trial_spec, dumps(spec, indent=1) + "\n")
    except OSError as error:
        shutil.rmtree(paths.folder, ignore_errors=True)
        problem = f"The run folder cannot be written in {request.out}: {error.strerror}"
        raise CannotTry(problem, "Choose another place with --out DIR") from None
    return paths


@dataclass
class _Trial:
    request: TrialRequest
    run_request: RunRequest
    paths: RunPaths
    fence: Fence
    token: str
    tell: Callable[[str], None]
    show: Callable[[Progress], None]

    def __post_init__(self) -> None:
        self._heartbeat = Heartbeat(self.paths, self.request.workload)
        self._seen = trial_processes.SeenProcesses()
        self._pid: int | None = None
        self._stopped: Stopped | None = None
        self._stepped = False
        self._environment = self.fence.environment(environment_of(self.run_request, self.paths))
        self._before = Snapshot.take()
        try:
            self._session = Session(self.run_request, self.paths, self.tell, self._environment)
        except (OSError, CannotWatch) as error:
            shutil.rmtree(self.paths.folder, ignore_errors=True)
            raise CannotTry(f"The trial cannot be watched: {error}") from None

    def run(self) -> CompletedTrial:
        self._session.restart_clock()
        born_ns = time.monotonic_ns()
        facts = self._session.facts
        trial = replace(facts.trial or TrialFacts(), spawned_ns=born_ns)
        self._session.facts = replace(facts, trial=trial)
        try:
            with uninterrupted() as signals:
                pid = self._begin(born_ns)
            if signals:
                raise KeyboardInterrupt
            with runner_process.end_of(pid) as end:
                self._monitor(end)
        except KeyboardInterrupt:
            self._stopped = Stopped(Outcome.INTERRUPTED, "it was interrupted")
        except BaseException as error:
            # We failed, not the trial: it is ended, and what was seen of it is kept.
            reason = f"its runner failed: {error}"
            self._stopped = Stopped(Outcome.CRASHED, reason, {"runner_failed": True})
            with uninterrupted():
                self._end_processes()
                if hasattr(self._session, "tree"):
                    self._finish()
                else:
                    if self._pid is not None:
                        os.waitpid(self._pid, 0)
                    shutil.rmtree(self.paths.folder, ignore_errors=True)
            raise
        with uninterrupted() as signals:
            if self._stopped:
                self._end_processes()
            completed = self._finish()
        return replace(completed, asked_to_end=bool(signals) or completed.asked_to_end)

    def _begin(self, born_ns: int) -> int:
        others = procfs.children()
        append, paths = os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.paths
        self._pid = pid = os.posix_spawn(
            sys.executable,
            [*self._session.request.command],
            self._environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(paths.stdout_log), append, 0o644),
                (os.POSIX_SPAWN_OPEN, 2, str(paths.stderr_log), append, 0o644),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[n for n in signal.Signals if n not in (signal.SIGKILL, signal.SIGSTOP)],
        )
        self._reaper = Reaper(self._session, pid)
        self.fence.place(pid)
        allow_many_descriptors()

        def is_orphan(pid: int) -> bool:
            """Whether a new child of ours is of this trial: we may have others of our own."""
            return trial_processes.belongs(pid, self.token, self._seen)

        self._session.begin(pid, os.getpid(), born_ns, tuple(others), is_orphan)
        return pid

    def _monitor(self, end: select.poll) -> None:
        """Sample, and check limits and progress, until the main process has ended or must end."""
        planned = time.monotonic()
        while not self._reaper.root_has_ended():
            now = time.monotonic()
            if now >= planned:
                self._tick(now - planned)
                planned = next_tick(planned, self.request.interval)
            if self._stopped:
                return
            end.poll(max(0.0, planned - time.monotonic()) * 1e3)

    def _tick(self, late_s: float) -> None:
        self._reaper.safely(self._session.tick, late_s)
        self._reaper.safely(self._reaper.reap_orphans)
        pids = [p.pid for p in self._session.tree if p.state != "Z"]
        self._seen.add(pids)
        self._stopped = self.fence.inspect(pids)
        progress = self._heartbeat.read()
        self.show(progress)
        if progress.steps and not self._stepped:
            self._stepped = True
            self._session.read_memory()
        limits, limit = self.request.limits, ""
        if limits.timeout_s is not None and progress.elapsed_s > limits.timeout_s:
            limit, reason = "timeout", f"it was not done after {limits.timeout_s:g} s"
        elif progress.silent_s > limits.stall_timeout_s:
            limit, reason = "hang", f"nothing was heard of it for {limits.stall_timeout_s:g} s"
        if limit and not self._stopped:
            evidence = {"limit": limit, "phase": progress.phase, **self._stack_evidence(pids)}
            self._stopped = Stopped(Outcome.TIMEOUT, reason, evidence)

    def _stack_evidence(self, pids: list[int]) -> dict[str, str]:
        """Every Python process dumps its stacks; one may show what the others wait for."""
        file, workload = self.paths.trial_stacks, self.request.workload
        if not stacks.dump(pids, file, _STACKS_PATIENCE_S):
            return {}
        evidence = {"stacks": "trial/stacks.txt"}
        if workload.is_own:
            own_file = Path(workload.model.rpartition(":")[0]).name
            if place := stacks.stood_at(file, own_file):
                evidence["stood_at"] = place
        return evidence

    def _end_processes(self) -> None:
        trial_processes.end_all(self.token, self._seen, _END_PATIENCE_S)

    def _finish(self) -> CompletedTrial:
        session, reaper = self._session, self._reaper

        def all_left() -> bool:
            return not trial_processes.processes_of(self.token, self._seen)

        if not all_left():
            # Workers notice by themselves that their main process is gone, a moment later.
            wait_until(all_left, _ORPHAN_PATIENCE_S)
            self._end_processes()
        wait_until(reaper.root_has_ended, _BURIAL_S)
        reaper.safely(reaper.reap_orphans)
        session.mark_end_time(time.monotonic_ns())
        reaper.safely(session.last_sample)
        ending = self._judge()
        if not tail_of(self.paths.trial_stacks):
            self.paths.trial_stacks.unlink(missing_ok=True)
        left = leftovers(self._before, self.token, self._seen)
        device = device_kind(next(iter(self._heartbeat.ranks()), RankFacts()))
        machine = MachineKind.of(session.facts.environment, device, self.request.noise_key)
        trial = replace(
            session.facts.trial or TrialFacts(),
            spread=NoiseStore(tell=self.tell).get(machine),
            ended_ns=session.facts.ending.monotonic_ns,
            cleaned_ns=time.monotonic_ns(),
            left=tuple(left.describe()),
            removed=tuple(left.removed),
            unclaimed=tuple(left.unclaimed),
        )
        session.facts = replace(session.facts, limits=self.fence.facts(), trial=trial)
        reaper.safely(session.end, ending, [])
        interrupted = ending.outcome is Outcome.INTERRUPTED
        return CompletedTrial(self.paths, ending, left.describe(), interrupted)

    def _judge(self) -> Ending:
        session, ranks = self._session, self._heartbeat.ranks()
        errors = [rank.error for rank in ranks if rank.error]
        bad = next((error for error in errors if error.kind == "workload"), None)
        if bad and not self._stopped and not self._stepped:
            said = {"type": bad.type, "message": bad.message, "hint": bad.hint}
            return Ending(Outcome.CRASHED, bad.message, evidence={"bad_workload": said})
        progress, counts = self._heartbeat.read(now=True), self.fence.counts()
        ending = judge_trial(
            TrialEvidence(
                status=self._reaper.status or 0,
                ranks=ranks,
                expected_ranks=self.request.workload.ranks,
                stopped=self._stopped,
                kills=counts.kills or 0,
                counters=counts.counters,
                before=session.evidence,
                after=KernelEvidence.now(session.cgroup),
                shm_share=session.shm_share(),
                stderr=mask_text(tail_of(self.paths.stderr_log)),
                disk_is_full=runner_process.is_full(self.paths.folder),
            )
        )
        if ending.outcome is Outcome.OK:
            return ending
        where = {"phase": progress.phase, "steps": progress.steps}
        return replace(ending, evidence={**where, **ending.evidence})
