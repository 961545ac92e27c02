"""One monitored process tree: its sensors, its run folder and its facts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from stepscope.capture.environment import environment_record
from stepscope.capture.gpu_monitor import GpuMonitor
from stepscope.capture.hook_monitor import HookMonitor
from stepscope.capture.outcome import KernelEvidence
from stepscope.capture.request import RunRequest
from stepscope.capture.sampler import MonitorSensor, Sampler
from stepscope.records import ExitStatus, Outcome
from stepscope.records.facts import Clock, StoredExitStatus
from stepscope.runs.facts import identity, identity_of_self, write_facts
from stepscope.runs.masking import mask_command, mask_text
from stepscope.runs.paths import FORMAT, RunPaths
from stepscope.sensors import process
from stepscope.sensors.cgroup import CgroupSensor, allowed_cpus, find_cgroup
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
        """Whether `begin` was called, so that the tree and its sensors exist."""
        self.problems: dict[str, int] = {}
        self._notify = notify
        self._next_poll = 0.0
        self._read_pss_at = 0.0
        self._polls = 0
        self._cpu_limit_pid: int | None = None
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
        self._shm_share: float | None = None
        self._gpus_in_time = self._gpus.reader.wait_until_open(_OPEN_GPUS_S)

    def restart_clock(self) -> None:
        """Set the start of the run to now, after the preparation."""
        self.facts = replace(self.facts, clock=Clock(time.monotonic_ns(), time.time_ns()))

    def begin(
        self,
        root: int,
        subreaper: int | None,
        started_ns: int | None,
        exclude: tuple[int, ...] = (),
        is_orphan: Callable[[int], bool] = lambda pid: True,
    ) -> None:
        """Start monitoring a tree. `started_ns` is its start time, or None if it was already
        running. `subreaper` is the process that inherits its orphans."""
        started_here = started_ns is not None
        self.tree = tree = ProcessTree(root, subreaper, exclude, is_orphan)
        self.cgroup = find_cgroup(root)
        self.usage = process.UsageSensor(tree, started_here)
        self.io = process.IoSensor(tree, started_here)
        self._detail = process.DetailSensor(tree, started_here)
        self._pss = process.SharedMemorySensor(tree)
        switches = process.SwitchesSensor(tree, started_here)
        for sensor in (self.usage, self.io, self._detail, switches, self._pss):
            self.sampler.add(sensor, started_ns)
        self._surroundings = (CgroupSensor(self.cgroup), NetworkSensor(tree.network_namespaces))
        for surrounding in self._surroundings:
            self.sampler.add(surrounding)
        self._gpus.processes.pids = lambda: tree.processes
        self._gpus.processes.ran_before = not (started_here and self._gpus_in_time)
        self.sampler.add_reader(self._gpus.reader)
        self.sampler.add(MonitorSensor(self.sampler))
        self.evidence = KernelEvidence.now(self.cgroup)
        self.hook = HookMonitor(self.paths, tree, self.request.command, self.request.hook)
        self.facts = replace(self.facts, root=identity(root))
        self._write_facts()
        self.has_begun = True

    def tick(self, late_s: float) -> None:
        """Take one sample and do everything else that is due."""
        self.sampler.tick(late_s)
        now = time.monotonic()
        if self.usage.appeared:
            self.usage.appeared = False
            self._read_pss_at = now + _SETTLE_S
        if self._read_pss_at and now >= self._read_pss_at:
            self._read_pss_at = 0.0
            self.read_memory()
        if now >= self._next_poll:
            self._next_poll = now + _POLL_S
            self._poll()

    def read_memory(self) -> None:
        """Read the shared memory soon. Without it the sum over processes counts it repeatedly."""
        self.sampler.read_soon(self._pss, self.request.memory_burst_s)

    def last_sample(self) -> None:
        """Read all inexpensive sensors once more, while exited processes are still readable."""
        sensors = (self._host, self._shm, self.usage, self.io, self._detail)
        self.sampler.read_all(*sensors, *self._surroundings)

    def end(self, exit_status: ExitStatus, survivors: list[str]) -> None:
        self.hook.poll()
        message = self.hook.new_message(at_end=True)
        is_useful = exit_status.outcome is Outcome.OK or self.hook.attached
        if message and is_useful and self.request.announce_hook:
            self._notify(message)
        self.sampler.finish()
        self._gpus.close()
        self.tree.close()
        ended_ns = self.facts.exit_status.monotonic_ns or time.monotonic_ns()
        stored = StoredExitStatus(**vars(exit_status), monotonic_ns=ended_ns)
        self.facts = replace(self.facts, exit_status=stored, survivors=tuple(survivors))
        self._write_facts()

    def mark_end_time(self, t_ns: int) -> None:
        """Set the time at which the command exited; the facts are written later."""
        self.facts = replace(
            self.facts, exit_status=replace(self.facts.exit_status, monotonic_ns=t_ns)
        )

    def survivors(self) -> list[str]:
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
        self.hook.poll()
        since = time.monotonic_ns() - _RECENT_S * 1e9
        return next((mask_text(error) for t, error in self.hook.gpu_ooms if t > since), None)

    def _poll(self) -> None:
        self._polls += 1
        if self.hook.poll():
            self.read_memory()
        message = self.hook.new_message()
        if message and self.request.announce_hook:
            self._notify(message)
        if message or self._gpus.has_new_gpus():
            self._write_facts()
        self.shm_share()
        # The CPUs that the training process may use: the command may have restricted them.
        pid = next((p for p in self.tree.trains if p in self.tree.processes), self.tree.root)
        is_due = self._polls <= _SETTLED_POLLS or self._polls % _AFFINITY_POLLS == 0
        if (is_due or pid != self._cpu_limit_pid) and pid in self.tree.processes:
            self._cpu_limit_pid = pid
            environment = self.facts.environment
            cpu = replace(environment.cpu, allowed=allowed_cpus(pid, self.cgroup))
            self.facts = replace(self.facts, environment=replace(environment, cpu=cpu))

    def _write_facts(self) -> None:
        self.facts = replace(
            self.facts,
            hook=self.hook.facts(),
            environment=self._gpus.add_to(self.facts.environment),
            sensors=self.sampler.facts(*self._gpus.missing()),
            problems=self.problems,
        )
        try:
            write_facts(self.paths, self.facts)
        except OSError as error:
            self.report_problem(f"run.json cannot be written ({error.strerror})")

    def report_problem(self, text: str) -> None:
        """Count a problem with monitoring, and notify the user of its first occurrence."""
        self.problems[text] = self.problems.get(text, 0) + 1
        if self.problems[text] == 1:
            self._notify(f"{text}. The command continues. Run folder: {self.paths.folder}")
