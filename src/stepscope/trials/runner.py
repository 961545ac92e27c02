"""Runs one trial: starts it, limits, monitors and judges it, and cleans up after it.

The trial's processes get a session and a process group of their own, so that a Ctrl-C in our
terminal reaches only us. If we die, the guard ends them. Whatever is left of a trial keeps the next
one from starting.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stepscope.capture.command import Reaper
from stepscope.capture.outcome import KernelEvidence
from stepscope.capture.request import RunRequest
from stepscope.capture.schedule import sample_times
from stepscope.capture.session import Session
from stepscope.capture.spawn import adoption, allow_many_descriptors, environment_of
from stepscope.errors import BadWorkload, CannotTry, CannotWatch, StepscopeError, TooFewSamples
from stepscope.records import Ending, Outcome
from stepscope.records.codec import to_json
from stepscope.records.facts import RunFacts
from stepscope.records.trial import RankFacts
from stepscope.runs.masking import mask_text
from stepscope.runs.paths import RunPaths, write_json
from stepscope.sensors import procfs
from stepscope.trials import child
from stepscope.trials.heartbeat import Heartbeat, Progress
from stepscope.trials.limits.fence import Fence
from stepscope.trials.noise import MachineKind, NoiseStore, device_kind
from stepscope.trials.outcome import Stopped, TrialEvidence, judge_trial
from stepscope.trials.processes import stacks, trial_processes
from stepscope.trials.processes.guard import Guard
from stepscope.trials.processes.leftovers import Snapshot, check_clean, leftovers
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
_TAIL_BYTES = 65536
_FULL_BYTES = 16384
"""With less than a few blocks left not even a small file can be replaced."""
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class CompletedTrial:
    paths: RunPaths
    ending: Ending
    leftovers: list[str]  # what of it could not be cleaned up
    asked_to_end: bool = False
    """Whether a Ctrl-C came, perhaps when it was over already: no other should follow."""


class TrialSeries:
    """`with TrialSeries() as series`: trials one after the other, under one guard."""

    def __init__(self) -> None:
        self.token = trial_processes.new_token()
        self._count = 0
        self._is_clean = True

    def __enter__(self) -> TrialSeries:
        self._guard = Guard(self.token)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_clean:
            self._guard.dismiss()
        else:
            self._guard.leave()

    def run(
        self,
        request: TrialRequest,
        tell: Callable[[str], None],
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> CompletedTrial:
        """One trial, from nothing to nothing. BadWorkload if the workload cannot be used."""
        self._count += 1
        self._is_clean = False  # until the trial was cleaned up after, that is the guard's job
        try:
            completed = run_trial(request, f"{self.token}.{self._count}", self._guard, tell, show)
        except StepscopeError:
            self._is_clean = True
            raise
        self._is_clean = True
        return completed


def run_repeats(
    request: TrialRequest,
    tell: Callable[[str], None],
    show: Callable[[int, Progress], None] = lambda number, progress: None,
) -> Iterator[CompletedTrial]:
    """The same trial several times in fresh processes, as they end. Stops where one was
    interrupted, or left something behind."""
    repeats = request.repeats
    with TrialSeries() as series:
        for number in range(1, repeats + 1):
            facts = replace(request.facts, repeat=number, repeats=repeats)
            completed = series.run(replace(request, facts=facts), tell, partial(show, number))
            yield completed
            if completed.asked_to_end:
                return
            if completed.leftovers and number < repeats:
                left = f"{'; '.join(completed.leftovers)} is left of this one"
                raise CannotTry(f"The next trial was not started: {left}", "End it, then try again")


def run_trial(
    request: TrialRequest,
    token: str,
    guard: Guard,
    tell: Callable[[str], None],
    show: Callable[[Progress], None],
) -> CompletedTrial:
    """One trial of a series: `token` begins with that of the guard, and no other trial has it."""
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
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    fence = Fence(request.limits, token, workload.ranks, workload.workers)
    try:
        for path in fence.group_paths():
            guard.tell_group(path)
        trial = replace(request.facts, started_ns=started_ns)
        # What the user typed says more than what we start.
        facts = RunFacts(command=trial.command, workload=to_json(workload), trial=trial)
        run = RunRequest(
            request.name or workload.short_name,
            [sys.executable, "-m", child.__name__],
            interval_s=request.interval,
            out=request.out,
            announce_hook=False,
            facts=facts,
            memory_burst_s=_MEMORY_BURST_S,
            folder=request.folder,
        )
        paths = _make_folder(request, run, fence)
        run = replace(run, command=[*run.command, str(paths.trial_spec)])
        with adoption:
            return _Trial(request, run, paths, fence, token, tell, show).run()
    finally:
        fence.close()
        # Monitoring raises the limit of open files; the next trial gets the one that this one got.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Collect signals that ask us to end instead of obeying: neither a second Ctrl-C nor a closed
    terminal cuts cleaning up short. Python delivers signals to the main thread only."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in _END_SIGNALS}
    for number in _END_SIGNALS:
        if before[number] not in (signal.SIG_IGN, None):
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _make_folder(request: TrialRequest, run: RunRequest, fence: Fence) -> RunPaths:
    """The run folder with the specification that the trial's processes read, or nothing at all."""
    try:
        paths = run.make_folder()
    except CannotWatch as error:
        raise CannotTry(error.message, error.hint) from None
    spec = child.ChildSpec(
        workload=request.workload,
        threads=fence.threads,
        gpu_memory=request.limits.gpu_memory,
        profiled_steps=PROFILED_STEPS if request.profile else 0,
        cycle=request.cycle,
    )
    try:
        paths.trial.mkdir()
        write_json(paths.trial_spec, spec)
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
        trial = replace(facts.trial, spawned_ns=born_ns)
        self._session.facts = replace(facts, trial=trial)
        try:
            with uninterrupted() as signals:
                pid = self._begin(born_ns)
            if signals:
                raise KeyboardInterrupt
            self._monitor(pid)
        except KeyboardInterrupt:
            self._stopped = Stopped(Outcome.INTERRUPTED, "it was interrupted")
        except BaseException as error:
            # We failed, not the trial: it is ended, and what was seen of it is kept.
            reason = f"its runner failed: {error}"
            self._stopped = Stopped(Outcome.CRASHED, reason, {"runner_failed": True})
            with uninterrupted():
                self._end_processes()
                if self._session.has_begun:
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

    def _monitor(self, pid: int) -> None:
        """Sample, and check limits and progress, until the main process has ended or must end."""
        end = select.poll()
        with contextlib.ExitStack() as opened:
            # Without pidfd (Linux 5.3) only its timeout wakes the poll up.
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
                opened.callback(os.close, pidfd)
                end.register(pidfd, select.POLLIN)
            for next_sample in sample_times(self._reaper.tick, self.request.interval):
                if self._reaper.root_has_ended():
                    return
                pids = [p.pid for p in self._session.tree if p.state != "Z"]
                self._seen.add(pids)
                self._stopped = self.fence.inspect(pids) or self._check_progress(pids)
                if self._stopped:
                    return
                end.poll(max(0.0, next_sample - time.monotonic()) * 1e3)

    def _check_progress(self, pids: list[int]) -> Stopped | None:
        """Why the trial must end, where it takes too long. Every Python process dumps its stacks
        then: one may show what the others wait for."""
        progress, limits = self._heartbeat.read(), self.request.limits
        self.show(progress)
        if progress.steps and not self._stepped:
            self._stepped = True
            self._session.read_memory()
        if limits.timeout_s is not None and progress.elapsed_s > limits.timeout_s:
            limit, reason = "timeout", f"it was not done after {limits.timeout_s:g} s"
        elif progress.silent_s > limits.stall_timeout_s:
            limit, reason = "hang", f"nothing was heard of it for {limits.stall_timeout_s:g} s"
        else:
            return None
        evidence = {"limit": limit, "phase": progress.phase}
        file, workload = self.paths.trial_stacks, self.request.workload
        if stacks.dump(pids, file, _STACKS_PATIENCE_S):
            evidence["stacks"] = str(file.relative_to(self.paths.folder))
            own_file = Path(workload.model.rpartition(":")[0]).name
            if workload.is_own and (place := stacks.stood_at(file, own_file)):
                evidence["stood_at"] = place
        return Stopped(Outcome.TIMEOUT, reason, evidence)

    def _end_processes(self) -> None:
        trial_processes.end_all(self.token, self._seen, _END_PATIENCE_S)

    def _finish(self) -> CompletedTrial:
        session, reaper = self._session, self._reaper

        def all_left() -> bool:
            return not trial_processes.processes_of(self.token, self._seen)

        if not all_left():
            # Workers notice by themselves that their main process is gone, a moment later.
            _wait_until(all_left, _ORPHAN_PATIENCE_S)
            self._end_processes()
        _wait_until(reaper.root_has_ended, _BURIAL_S)
        reaper.safely(reaper.reap_orphans)
        session.mark_end_time(time.monotonic_ns())
        reaper.safely(session.last_sample)
        ranks = self._heartbeat.ranks()
        errors = [rank.error for rank in ranks if rank.error]
        bad = next((error for error in errors if error.kind == "workload"), None)
        if self._stopped or self._stepped:
            bad = None
        ending = Ending(Outcome.CRASHED, bad.message) if bad else self._judge(ranks)
        if not _tail_of(self.paths.trial_stacks):
            self.paths.trial_stacks.unlink(missing_ok=True)
        left = leftovers(self._before, self.token, self._seen)
        device = device_kind(next(iter(ranks), RankFacts()))
        machine = MachineKind.of(session.facts.environment, device, self.request.noise_key)
        trial = replace(
            session.facts.trial,
            spread=NoiseStore(tell=self.tell).get(machine),
            ended_ns=session.facts.ending.monotonic_ns,
            cleaned_ns=time.monotonic_ns(),
            left=tuple(left.describe()),
            removed=tuple(left.removed),
            unclaimed=tuple(left.unclaimed),
        )
        session.facts = replace(session.facts, limits=self.fence.facts(), trial=trial)
        reaper.safely(session.end, ending, [])
        if bad:  # a model that does not exist is not a result: nothing is kept of it
            shutil.rmtree(self.paths.folder, ignore_errors=True)
            kind = TooFewSamples if bad.type == TooFewSamples.__name__ else BadWorkload
            raise kind(bad.message, bad.hint)
        return CompletedTrial(
            paths=self.paths,
            ending=ending,
            leftovers=left.describe(),
            asked_to_end=ending.outcome is Outcome.INTERRUPTED,
        )

    def _judge(self, ranks: list[RankFacts]) -> Ending:
        session = self._session
        progress, counts = self._heartbeat.read(at_once=True), self.fence.counts()
        disk_is_full = False
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.paths.folder)
            disk_is_full = disk.f_bavail * disk.f_frsize < _FULL_BYTES
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
                stderr=mask_text(_tail_of(self.paths.stderr_log)),
                disk_is_full=disk_is_full,
            )
        )
        if ending.outcome is Outcome.OK:
            return ending
        where = {"phase": progress.phase, "steps": progress.steps}
        return replace(ending, evidence={**where, **ending.evidence})


def _wait_until(happened: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.02)


def _tail_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
