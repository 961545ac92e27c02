"""One monitored process tree: its sensors, its run folder and its facts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from stepscope.capture.environment import environment_record
from stepscope.capture.gpu_monitor import GpuMonitor
from stepscope.capture.hook_monitor import HookMonitor
from stepscope.capture.outcome import KernelEvidence
from stepscope.capture.request import RunRequest
from stepscope.capture.sampler import MonitorSensor, Sampler
from stepscope.capture.startup import reason_of
from stepscope.errors import StepscopeError
from stepscope.inject.masking import mask_command, mask_text
from stepscope.records import ExitStatus, Outcome
from stepscope.records.facts import Clock, HookFacts, StoredExitStatus
from stepscope.runs.facts import identity, identity_of_self, write_facts
from stepscope.runs.paths import FORMAT, RunPaths
from stepscope.sensors import process
from stepscope.sensors.cgroup import Cgroup, CgroupSensor, allowed_cpus, find_cgroup
from stepscope.sensors.contract import Sensor
from stepscope.sensors.host import HostSensor, ShmSensor
from stepscope.sensors.network import NetworkSensor
from stepscope.sensors.tree import ProcessTree

_POLL_S = 0.9
_SETTLED_POLLS = 3
"""Polls after which a launcher such as `taskset` has started the actual command."""
_AFFINITY_POLLS = 4
"""Polls between checks of the CPU affinity, which a script may restrict after its imports."""
_SETTLE_S = 0.5
"""Delay between the start of processes and the reading of PSS, so that their memory is touched."""
_RECENT_S = 30.0
"""A GPU out-of-memory error at most this long before the end may have ended the command."""
_OPEN_GPUS_S = 0.3
"""How long the start waits for the NVIDIA driver. GPUs found later are read from then on."""


_S = TypeVar("_S", bound=Sensor)
_T = TypeVar("_T")


class IncompleteMonitoring(RuntimeError):
    """Parts of monitoring did not start; the other parts did. The message names them."""


class Session:
    """Monitors one process tree from `begin` to `end`; call `tick` at every interval."""

    def __init__(
        self,
        request: RunRequest,
        paths: RunPaths,
        notify: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        pid: int | None = None,
    ) -> None:
        """`environment` is the environment of the command if it is not that of this process. `pid`
        is the process if it is already running."""
        self.request = request
        self.paths = paths
        self.has_begun = False
        """Whether `begin` has started everything, so that the tree and its sensors exist."""
        self.cgroup, self.evidence = Cgroup(), KernelEvidence(None, None)
        self.hook: HookMonitor | None = None
        self.problems: dict[str, int] = {}
        self._notify = notify
        self._next_poll = 0.0
        self._read_pss_at = 0.0
        self._polls = 0
        self._cpu_limit_pid: int | None = None
        self._tree: ProcessTree | Exception = RuntimeError("monitoring has not begun")
        """The process tree, or the error because of which there is none."""
        self._usage: process.UsageSensor | None = None
        self._io: process.IoSensor | None = None
        self._pss: process.SharedMemorySensor | None = None
        self._unmonitored: dict[str, str] = {}
        """Metrics of the sensors that did not start, with the reason."""
        self._gpus = GpuMonitor(
            os.environ if environment is None else environment, self.report_problem
        )
        self.facts = replace(
            request.facts,
            format=FORMAT,
            name=mask_text(request.name),
            command=request.facts.command or tuple(mask_command(request.command)),
            cwd=str(request.cwd),
            interval_s=request.interval_s,
            monitor=identity_of_self(),
            exit_status=StoredExitStatus(Outcome.RUNNING, "still running"),
            environment=environment_record(request.command, request.cwd, pid),
        )
        self.restart_clock()
        write_facts(paths, self.facts)
        self.sampler = Sampler(paths, request.interval_s, self.report_problem)
        self._host, self._shm = HostSensor(), ShmSensor()
        self.sampler.add(self._host)
        self.sampler.add(self._shm)
        self._last: tuple[Sensor | None, ...] = (self._host, self._shm)
        """The inexpensive sensors."""
        self._shm_share: float | None = None
        self._reserved: list[int] = []
        """Descriptors to write the outcome with, even if the limit of open files is reached."""
        with contextlib.suppress(OSError):
            for _ in range(2):
                self._reserved.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        self._gpus_in_time = self._gpus.reader.wait_until_open(_OPEN_GPUS_S)

    def restart_clock(self) -> None:
        """Set the start of the run to now, after the preparation."""
        self.facts = replace(self.facts, clock=Clock(time.monotonic_ns(), time.time_ns()))

    @property
    def has_tree(self) -> bool:
        return isinstance(self._tree, ProcessTree)

    @property
    def tree(self) -> ProcessTree:
        """The process tree. Without one, raises the error because of which there is none."""
        if isinstance(self._tree, Exception):
            raise self._tree
        return self._tree

    def begin(
        self,
        root: int,
        subreaper: int | None,
        started_ns: int | None,
        exclude: tuple[int, ...] = (),
        is_orphan: Callable[[int], bool] = lambda pid: True,
    ) -> None:
        """Start monitoring a tree. `started_ns` is its start time, or None if it was already
        running. `subreaper` is the process that inherits its orphans.

        Starts every part that can be started, and raises IncompleteMonitoring if one cannot.
        """
        started_here = started_ns is not None
        failed: dict[str, list[str]] = {}

        def add(
            kind: type[_S], make: Callable[[type[_S]], _S], from_ns: int | None = started_ns
        ) -> _S | None:
            try:
                sensor = make(kind)  # raises an error if there is no tree
                self.sampler.add(sensor, from_ns)
                return sensor
            except Exception as error:
                failed.setdefault(reason_of(error), []).append(kind.name)
                self._unmonitored |= dict.fromkeys(kind.metrics, reason_of(error))
                return None

        self.cgroup = self.safely(find_cgroup, root) or self.cgroup
        self.evidence = self.safely(KernelEvidence.now, self.cgroup) or self.evidence
        try:
            self._tree = ProcessTree(root, subreaper, exclude, is_orphan)
        except Exception as error:
            self._tree = error
        processes = self.tree.processes if self.has_tree else {}
        self._usage = add(process.UsageSensor, lambda kind: kind(self.tree, started_here))
        self._io = add(process.IoSensor, lambda kind: kind(self.tree, started_here))
        detail = add(process.DetailSensor, lambda kind: kind(self.tree, started_here))
        add(process.SwitchesSensor, lambda kind: kind(self.tree, started_here))
        self._pss = add(process.SharedMemorySensor, lambda kind: kind(self.tree))
        cgroup = add(CgroupSensor, lambda kind: kind(self.cgroup), None)
        network = add(NetworkSensor, lambda kind: kind(self.tree.network_namespaces), None)
        self._last = (self._host, self._shm, self._usage, self._io, detail, cgroup, network)
        add(MonitorSensor, lambda kind: kind(self.sampler), None)
        self._gpus.processes.pids = lambda: processes
        self._gpus.processes.ran_before = not (started_here and self._gpus_in_time)
        self.sampler.add_reader(self._gpus.reader)
        try:
            self.hook = HookMonitor(
                self.paths,
                self.tree if self.has_tree else None,
                self.request.command,
                self.request.hook,
            )
        except Exception as error:
            failed.setdefault(reason_of(error), []).append("import hook")
        self.facts = replace(self.facts, root=identity(root))
        self._write_facts()
        if failed:
            parts = (f"{', '.join(names)} ({reason})" for reason, names in failed.items())
            raise IncompleteMonitoring("; ".join(parts))
        self.has_begun = True

    def safely(self, action: Callable[..., _T], *arguments: Any) -> _T | None:
        """Call `action`. A failure of monitoring must not affect the command or its exit code: it
        is reported, and None is returned."""
        try:
            return action(*arguments)
        except Exception as error:
            with contextlib.suppress(Exception):  # no memory, not even for a message
                if isinstance(error, IncompleteMonitoring):
                    self.report_problem(f"sensors not started: {error}")
                elif isinstance(error, StepscopeError):
                    self.report_problem(str(error))
                else:
                    self.report_problem(f"part of the monitoring failed: {reason_of(error)}")
            return None

    def tick(self, late_s: float) -> None:
        """Take one sample and do everything else that is due."""
        self.sampler.tick(late_s)
        now = time.monotonic()
        if self._usage is not None and self._usage.appeared:
            self._usage.appeared = False
            self._read_pss_at = now + _SETTLE_S
        if self._read_pss_at and now >= self._read_pss_at:
            self._read_pss_at = 0.0
            self.read_memory()
        if now >= self._next_poll:
            self._next_poll = now + _POLL_S
            self._poll()

    def read_memory(self) -> None:
        """Read the shared memory soon. Without it the sum over processes counts it repeatedly."""
        if self._pss is not None:
            self.sampler.read_soon(self._pss, self.request.memory_burst_s)

    def last_sample(self) -> None:
        """Read all inexpensive sensors once more, while exited processes are still readable."""
        self.sampler.read_all(*self._last)

    def account(self) -> None:
        """Add the usage of all processes so far, before one of them is reaped."""
        if self._usage is not None:
            self._usage.account(thorough=True)

    def read_zombie(self, pid: int) -> None:
        """Read a zombie for the last time."""
        if self._io is not None:
            self._io.reaped(pid)

    def reaped(self, pid: int, cpu_s: float) -> None:
        """Account for the CPU time of a process that was reaped."""
        if self._usage is not None:
            self._usage.reaped(pid, cpu_s)
        if self.has_tree:
            self.tree.forget(pid)

    def end(self, exit_status: ExitStatus, survivors: list[str]) -> None:
        """Record the outcome first: what follows takes time, and may fail or be killed."""
        self.record(exit_status, survivors)
        self.finish()

    def record(self, exit_status: ExitStatus, survivors: list[str]) -> None:
        """Write the samples and the outcome."""
        while self._reserved:
            os.close(self._reserved.pop())
        self.safely(self.sampler.flush)
        ended_ns = self.facts.exit_status.monotonic_ns or time.monotonic_ns()
        stored = StoredExitStatus(**vars(exit_status), monotonic_ns=ended_ns)
        self.facts = replace(self.facts, exit_status=stored, survivors=tuple(survivors))
        self._write_facts()

    def finish(self) -> None:
        """Convert the samples to their final form and close all sensors, after `record`."""
        self.safely(self._announce_at_end)
        self.safely(self.sampler.finish)
        self.safely(self._gpus.close)
        if self.has_tree:
            self.safely(self.tree.close)
        self._write_facts()

    def mark_end_time(self, t_ns: int) -> None:
        """Set the time at which the command exited; the facts are written later."""
        self.facts = replace(
            self.facts, exit_status=replace(self.facts.exit_status, monotonic_ns=t_ns)
        )

    def survivors(self) -> list[str]:
        if not self.has_tree:
            return []
        return [f"{p.name} (PID {p.pid})" for p in self.tree.survivors()]

    def shm_share(self) -> float | None:
        """Return the largest share of /dev/shm in use that was seen so far."""
        for reading in self._shm.read():
            used, size = reading.values.get("shm_used"), reading.values.get("shm_size")
            if used is not None and size:
                self._shm_share = max(self._shm_share or 0.0, used / size)
        return self._shm_share

    def oom_kills(self) -> int:
        """Return the number of OOM kills in the cgroup since the start."""
        return KernelEvidence.now(self.cgroup).cgroup_kills_since(self.evidence)

    def gpu_oom(self) -> str | None:
        """Return the GPU out-of-memory error that recently ended a process, if any. An older one
        (for example of one trial of many) did not end the command."""
        if self.hook is None:
            return None
        self.hook.poll()
        since = time.monotonic_ns() - _RECENT_S * 1e9
        return next((mask_text(error) for t, error in self.hook.gpu_ooms if t > since), None)

    def _announce_at_end(self) -> None:
        if self.hook is not None:
            self.hook.poll()
            message = self.hook.new_message(at_end=True)
            is_useful = self.facts.exit_status.outcome is Outcome.OK or self.hook.attached
            if message and is_useful and self.request.announce_hook:
                self._notify(message)

    def _poll(self) -> None:
        self._polls += 1
        message = None
        if self.hook is not None:
            if self.hook.poll():
                self.read_memory()
            message = self.hook.new_message()
        if message and self.request.announce_hook:
            self._notify(message)
        if message or self._gpus.has_new_gpus():
            self._write_facts()
        self.shm_share()
        if self.has_tree:
            self._update_allowed_cpus()

    def _update_allowed_cpus(self) -> None:
        """Record the CPUs that the training process may use: the command may have restricted
        them."""
        pid = next((p for p in self.tree.trains if p in self.tree.processes), self.tree.root)
        is_due = self._polls <= _SETTLED_POLLS or self._polls % _AFFINITY_POLLS == 0
        if (is_due or pid != self._cpu_limit_pid) and pid in self.tree.processes:
            self._cpu_limit_pid = pid
            environment = self.facts.environment
            cpu = replace(environment.cpu, allowed=allowed_cpus(pid, self.cgroup))
            self.facts = replace(self.facts, environment=replace(environment, cpu=cpu))

    def _write_facts(self) -> None:
        self.safely(self._update_facts)
        self.safely(self._store_facts)

    def _update_facts(self) -> None:
        missing, hints = self._gpus.missing()
        self.facts = replace(
            self.facts,
            hook=HookFacts(self.request.hook) if self.hook is None else self.hook.facts(),
            environment=self._gpus.add_to(self.facts.environment),
            sensors=self.sampler.facts(self._unmonitored | missing, hints),
            problems=self.problems,
        )

    def _store_facts(self) -> None:
        try:
            write_facts(self.paths, self.facts)
        except OSError as error:
            raise StepscopeError(f"run.json cannot be written ({error.strerror})") from None

    def report_problem(self, text: str) -> None:
        """Count a problem with monitoring, and notify the user of its first occurrence."""
        self.problems[text] = self.problems.get(text, 0) + 1
        if self.problems[text] == 1:
            is_running = self.facts.exit_status.outcome is Outcome.RUNNING
            continues = "The command continues. " if is_running else ""
            self._notify(f"{text}. {continues}Run folder: {self.paths.folder}")
