"""Run a trial: start, limit, monitor and evaluate it, and clean up after it.

The processes of a trial have their own session and process group, so that Ctrl-C in the terminal
reaches only the runner, and their own cgroup, so that no process is lost. If the runner is killed,
the guard ends them; if the guard is killed too, the next trial does. Leftovers of a trial prevent
the next one from starting.
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
from stepscope.capture.session import IncompleteMonitoring, Session
from stepscope.capture.spawn import allow_many_descriptors, environment_of, subreaper
from stepscope.capture.startup import start_error
from stepscope.errors import (
    GpuUnavailable,
    MonitorError,
    StepscopeError,
    TooFewSamples,
    TrialError,
    WorkloadError,
)
from stepscope.inject.masking import mask_text, mask_values
from stepscope.records import ExitStatus, Outcome
from stepscope.records.codec import to_json
from stepscope.records.facts import RunFacts
from stepscope.records.trial import RankFacts
from stepscope.runs.files import read_json, write_json
from stepscope.runs.paths import RunPaths
from stepscope.sensors import procfs
from stepscope.trials import child
from stepscope.trials.heartbeat import Heartbeat, Progress
from stepscope.trials.limits.enforcement import EnforcedLimits
from stepscope.trials.noise import MachineKind, NoiseStore, device_kind
from stepscope.trials.outcome import Stopped, TrialEvidence, judge_trial
from stepscope.trials.processes import stacks, trial_processes
from stepscope.trials.processes.guard import Guard
from stepscope.trials.processes.leftovers import (
    Leftovers,
    RunningTrial,
    Snapshot,
    check_clean,
    leftovers,
)
from stepscope.trials.request import TrialRequest
from stepscope.workloads.datasets.locate import locate

PROFILED_STEPS = 5
_END_PATIENCE_S = 3.0
_STACKS_PATIENCE_S = 2.0
_ORPHAN_PATIENCE_S = 0.5
"""Time for the remaining processes to exit after the main process of a trial."""
_REAP_TIMEOUT_S = 10.0
"""A killed process that is still running after this time is stuck in the kernel."""
_MEMORY_BURST_S = 0.5
"""Peak host memory is a result of a trial, so reading it may cost more than in a run."""
_NOTIFY_AFTER_S = 2.0
_TAIL_BYTES = 65536
_FULL_BYTES = 16384
"""With less free space, not even a small file can be replaced."""
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class CompletedTrial:
    paths: RunPaths
    exit_status: ExitStatus
    leftovers: list[str]  # what could not be cleaned up
    termination_requested: bool = False
    """Whether Ctrl-C was received, even after the end of the trial: no other trial should start."""


class TrialSeries:
    """Consecutive trials with one guard, as a context manager."""

    def __init__(self) -> None:
        self.token = trial_processes.new_token()
        self._count = 0
        self._is_clean = True

    def __enter__(self) -> TrialSeries:
        try:
            self._guard = Guard(self.token)
        except OSError as error:
            raise start_error("The trial was not started", error, TrialError) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_clean:
            self._guard.dismiss()
        else:
            self._guard.keep_running()
            self._guard.clean_up()

    def run(
        self,
        request: TrialRequest,
        notify: Callable[[str], None],
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> CompletedTrial:
        """Run a trial and clean up; raises WorkloadError if the workload is invalid."""
        self._count += 1
        self._is_clean = False  # until the trial is cleaned up, the guard is responsible
        try:
            completed = run_trial(request, f"{self.token}.{self._count}", self._guard, notify, show)
        except StepscopeError:
            self._is_clean = True
            raise
        self._is_clean = True
        return completed


def run_repeats(
    request: TrialRequest,
    notify: Callable[[str], None],
    show: Callable[[int, Progress], None] = lambda number, progress: None,
) -> Iterator[CompletedTrial]:
    """Run a trial several times in fresh processes and yield each result. Stop after an interrupt
    or if a trial has leftovers."""
    repeats = request.repeats
    with TrialSeries() as series:
        for number in range(1, repeats + 1):
            facts = replace(request.facts, repeat=number, repeats=repeats)
            completed = series.run(replace(request, facts=facts), notify, partial(show, number))
            yield completed
            if completed.termination_requested:
                return
            if completed.leftovers and number < repeats:
                left = "; ".join(completed.leftovers)
                raise TrialError(
                    "The next trial was not started because the previous one was not cleaned up "
                    "completely: "
                    f"{left}",
                    "Stop or remove it, then try again",
                )


def run_trial(
    request: TrialRequest,
    token: str,
    guard: Guard,
    notify: Callable[[str], None],
    show: Callable[[Progress], None],
) -> CompletedTrial:
    """Run a trial of a series. `token` is unique and starts with the token of the guard."""
    workload = request.workload
    show(Progress("generating data"))
    began = time.monotonic()
    place = None if workload.is_custom else locate(workload)
    took = time.monotonic() - began
    if place is not None and place.generated and took > _NOTIFY_AFTER_S:
        notify(f"generated {workload.data_name} data in {took:.0f} s; later trials reuse it")
    started_ns = time.monotonic_ns()  # generated data is not part of the trial
    for text in check_clean():
        notify(text)
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    enforced_limits = EnforcedLimits(request.limits, token, workload.ranks, workload.workers)
    try:
        guard.keep_running(notify)
        for path in enforced_limits.group_paths():
            guard.add_group(path)
        trial = replace(request.facts, started_ns=started_ns)
        # The command of the user is more informative than the internal one.
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
        paths = _make_folder(request, run, enforced_limits)
        run = replace(run, command=[*run.command, str(paths.trial_spec)])
        with subreaper:
            return _Trial(request, run, paths, enforced_limits, token, guard, notify, show).run()
    finally:
        enforced_limits.close()
        RunningTrial.remove(token)
        # Monitoring raises the limit of open files; restore it for the next trial.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Collect termination signals instead of handling them, so that neither a second Ctrl-C nor a
    closed terminal interrupts the cleanup. Python delivers signals to the main thread only."""
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


def _make_folder(
    request: TrialRequest, run: RunRequest, enforced_limits: EnforcedLimits
) -> RunPaths:
    """Create the run folder with the specification for the trial processes."""
    try:
        paths = run.make_folder()
    except MonitorError as error:
        raise TrialError(error.message, error.hint) from None
    spec = child.ChildSpec(
        workload=request.workload,
        threads=enforced_limits.threads,
        gpu_memory=request.limits.gpu_memory,
        profiled_steps=PROFILED_STEPS if request.profile else 0,
        cycle=request.cycle,
    )
    try:
        paths.trial.mkdir()
        write_json(paths.trial_spec, spec)
    except OSError as error:
        shutil.rmtree(paths.folder, ignore_errors=True)
        problem = f"Cannot write the run folder in {request.out}: {error.strerror}"
        raise TrialError(problem, "Choose another folder with --out DIR") from None
    return paths


@dataclass
class _Trial:
    request: TrialRequest
    run_request: RunRequest
    paths: RunPaths
    enforced_limits: EnforcedLimits
    token: str
    guard: Guard
    notify: Callable[[str], None]
    show: Callable[[Progress], None]

    def __post_init__(self) -> None:
        self._heartbeat = Heartbeat(self.paths, self.request.workload)
        self._seen = trial_processes.SeenProcesses()
        self._pid: int | None = None
        self._own_children = frozenset[int]()
        self._started: int | None = None  # clock ticks
        self._stopped: Stopped | None = None
        self._stepped = False
        self._environment = self.enforced_limits.environment(
            environment_of(self.run_request, self.paths)
        )
        self._before = Snapshot.take()
        groups = self.enforced_limits.group_paths()
        self._record = RunningTrial.of(self.paths.folder, groups, self._before)
        self._record.write(self.token)
        try:
            self._session = Session(self.run_request, self.paths, self.notify, self._environment)
        except Exception as error:
            shutil.rmtree(self.paths.folder, ignore_errors=True)
            raise start_error("Cannot monitor the trial", error, TrialError) from None

    def run(self) -> CompletedTrial:
        self._session.restart_clock()
        spawned_ns = time.monotonic_ns()
        facts = self._session.facts
        trial = replace(facts.trial, spawned_ns=spawned_ns)
        self._session.facts = replace(facts, trial=trial)
        try:
            with uninterrupted() as signals:
                pid = self._begin(spawned_ns)
            if signals:
                raise KeyboardInterrupt
            self._monitor(pid)
        except KeyboardInterrupt:
            self._stopped = Stopped(Outcome.INTERRUPTED, "interrupted")
        except BaseException as error:
            # The runner failed, not the trial: end the trial and keep what was recorded.
            reason = f"the runner failed: {error}"
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
        return replace(
            completed, termination_requested=bool(signals) or completed.termination_requested
        )

    def _begin(self, spawned_ns: int) -> int:
        self._own_children = frozenset(procfs.children())
        append, paths = os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.paths
        try:
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
        except OSError as error:
            raise start_error("The trial was not started", error, TrialError) from None
        self._started = procfs.start_ticks(pid)
        self._reaper = Reaper(self._session, pid)
        self.enforced_limits.place(pid)
        allow_many_descriptors()
        own_children = tuple(self._own_children)
        try:
            self._session.begin(pid, os.getpid(), spawned_ns, own_children, self._is_orphan)
        except IncompleteMonitoring as error:
            raise TrialError(f"Cannot monitor the trial: {error}") from None
        self.enforced_limits.hold_together(pid)
        return pid

    def _is_orphan(self, pid: int) -> bool:
        """Whether a new child belongs to this trial; we may have other children."""
        members = self.enforced_limits.members()
        if pid in {each.pid for each in members} or trial_processes.belongs(
            pid, self.token, self._seen
        ):
            return True
        adopted = next((each for each in self._adopted() if each.pid == pid), None)
        if adopted is None or not trial_processes.owns_all_children:
            return False
        # Nobody else can link it to the trial: it has neither its token nor its cgroup.
        self.guard.add_process(adopted)
        identities = (*self._record.processes, (adopted.pid, adopted.started))
        self._record = replace(self._record, processes=identities)
        self._record.write(self.token)
        return True

    def _adopted(self) -> list[trial_processes.TrialProcess]:
        """Return our children that started after the trial, outside its cgroup, in another session
        and without a token: orphans of the trial, unless another part of this program started
        them."""
        if self._started is None:
            return []
        children = set(procfs.children()) - self._own_children - Guard.pids - {self._pid}
        children -= {member.pid for member in self.enforced_limits.members()}
        return [
            process
            for process in map(trial_processes.identify, children)
            if process is not None
            and process.started >= self._started
            and process.session != os.getsid(0)
            and procfs.environ_value(process.pid, trial_processes.VARIABLE) is None
        ]

    def _more(self) -> list[trial_processes.TrialProcess]:
        """Return the processes of the trial that need not have its token."""
        found = self.enforced_limits.members()
        if trial_processes.owns_all_children:
            found += self._adopted()
        self._seen.remember(found)
        return found

    def _monitor(self, pid: int) -> None:
        """Sample, and check limits and progress, until the main process exits or must end."""
        end = select.poll()
        with contextlib.ExitStack() as opened:
            # Without pidfd (before Linux 5.3), only the timeout ends the poll.
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
                opened.callback(os.close, pidfd)
                end.register(pidfd, select.POLLIN)
            for next_sample in sample_times(self._reaper.tick, self.request.interval):
                if self._reaper.root_has_ended():
                    return
                self.guard.keep_running(self.notify)
                pids = [p.pid for p in self._session.tree if p.state != "Z"]
                self._seen.add(pids)
                self._stopped = self.enforced_limits.inspect(pids) or self._check_progress(pids)
                if self._stopped:
                    return
                end.poll(max(0.0, next_sample - time.monotonic()) * 1e3)

    def _check_progress(self, pids: list[int]) -> Stopped | None:
        """Return why the trial must end, if it takes too long. All Python processes then dump their
        stacks, since one may show what the rest waits for."""
        progress, limits = self._heartbeat.read(), self.request.limits
        self.show(progress)
        if progress.steps and not self._stepped:
            self._stepped = True
            self._session.read_memory()
        if limits.timeout_s is not None and progress.elapsed_s > limits.timeout_s:
            limit, reason = "timeout", f"exceeded the time limit of {limits.timeout_s:g} s"
        elif progress.silent_s > limits.stall_timeout_s:
            limit, reason = "stall_timeout", f"no progress for {limits.stall_timeout_s:g} s"
        else:
            return None
        evidence = {"limit": limit, "phase": progress.phase}
        file, workload = self.paths.trial_stacks, self.request.workload
        if stacks.dump(pids, file, _STACKS_PATIENCE_S):
            evidence["stacks"] = str(file.relative_to(self.paths.folder))
            custom_file = Path(workload.model.rpartition(":")[0]).name
            if workload.is_custom and (place := stacks.stalled_at(file, custom_file)):
                evidence["stalled_at"] = place
        return Stopped(Outcome.TIMEOUT, reason, evidence)

    def _end_processes(self) -> None:
        trial_processes.end_all(self.token, self._seen, _END_PATIENCE_S, self._more)

    def _finish(self) -> CompletedTrial:
        session, reaper = self._session, self._reaper

        def all_exited() -> bool:
            return not trial_processes.processes_of(self.token, self._seen, self._more)

        if not all_exited():
            # Workers exit a moment after their main process.
            _wait_until(all_exited, _ORPHAN_PATIENCE_S)
            self._end_processes()
        _wait_until(reaper.root_has_ended, _REAP_TIMEOUT_S)
        session.safely(reaper.reap_orphans)
        session.mark_end_time(time.monotonic_ns())
        session.safely(session.last_sample)
        ranks = self._heartbeat.ranks()
        errors = [rank.error for rank in ranks if rank.error]
        invalid = next((error for error in errors if error.kind == "workload"), None)
        if self._stopped or self._stepped:
            invalid = None
        if invalid:
            exit_status = ExitStatus(Outcome.CRASHED, invalid.message)
        else:
            exit_status = session.safely(self._judge, ranks) or ExitStatus(
                Outcome.CRASHED, "the outcome could not be determined"
            )
        # First: what follows takes time, and may fail or be killed.
        session.record(exit_status, [])
        session.safely(self._clean_up_files)
        left = session.safely(self._clean_up, ranks) or Leftovers()
        session.finish()
        if invalid:  # an invalid workload is not a result: keep nothing
            shutil.rmtree(self.paths.folder, ignore_errors=True)
            kinds = {kind.__name__: kind for kind in (TooFewSamples, GpuUnavailable)}
            raise kinds.get(invalid.type, WorkloadError)(invalid.message, invalid.hint)
        return CompletedTrial(
            paths=self.paths,
            exit_status=exit_status,
            leftovers=left.describe(),
            termination_requested=exit_status.outcome is Outcome.INTERRUPTED,
        )

    def _clean_up_files(self) -> None:
        """Remove an empty file of stacks, and mask the specification, which the processes of the
        trial needed as it was."""
        spec = self.paths.trial_spec
        if not _tail_of(self.paths.trial_stacks):
            self.paths.trial_stacks.unlink(missing_ok=True)
        write_json(spec, mask_values(read_json(spec)))

    def _clean_up(self, ranks: list[RankFacts]) -> Leftovers:
        """Remove what the trial has left, and add it to the facts of the run."""
        session = self._session
        self._reap()
        left = leftovers(self._before, self.token, self._seen, more=self._more)
        is_certain = trial_processes.owns_all_children or self.enforced_limits.group_paths()
        uncertain = [] if is_certain else self._adopted()
        device = device_kind(next(iter(ranks), RankFacts()))
        machine = MachineKind.of(session.facts.environment, device, self.request.noise_key)
        trial = replace(
            session.facts.trial,
            noise=NoiseStore(notify=self.notify).get(machine),
            ended_ns=session.facts.exit_status.monotonic_ns,
            cleaned_ns=time.monotonic_ns(),
            leftovers=(
                *left.describe(),
                *(f"{each} (may belong to your program)" for each in uncertain),
            ),
            removed=tuple(left.removed),
            unclaimed=tuple(left.unclaimed),
        )
        session.facts = replace(session.facts, limits=self.enforced_limits.facts(), trial=trial)
        return left

    def _reap(self) -> None:
        """Reap orphans that the monitor did not see, or did not see exit."""
        for process in self._seen:
            stat = procfs.stat(process.pid)
            if (
                stat is not None
                and stat.has_ended
                and (stat.started_ticks, stat.parent) == (process.started, os.getpid())
            ):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def _judge(self, ranks: list[RankFacts]) -> ExitStatus:
        session = self._session
        progress, counts = self._heartbeat.read(at_once=True), self.enforced_limits.counts()
        disk_is_full = False
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.paths.folder)
            disk_is_full = disk.f_bavail * disk.f_frsize < _FULL_BYTES
        exit_status = judge_trial(
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
        if exit_status.outcome is Outcome.OK:
            return exit_status
        where = {"phase": progress.phase, "steps": progress.steps}
        return replace(exit_status, evidence={**where, **exit_status.evidence})


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _tail_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
