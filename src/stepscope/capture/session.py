"""One monitored tree: its sensors, its run folder, and what is known of it so far."""

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
from stepscope.capture.sampler import Sampler, WatcherSensor
from stepscope.records import Ending, Outcome
from stepscope.records.facts import Clock, EndingFacts
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
"""By then a command has become what it is: `taskset` has run what it was told to run."""
_LOOK_AGAIN_POLLS = 4
"""A script may narrow its own CPUs once it has imported what it needs, seconds later."""
_SETTLE_S = 0.5
"""How long after processes appeared PSS is read: they have touched their memory by then."""
_JUST_NOW_S = 30.0
"""An error of a process this long before the end may be what ended the command."""
_WAKE_GPUS_S = 0.3
"""How long the command waits for the NVIDIA driver; what comes later is watched from then on."""


class Session:
    """Watches one tree, from `begin` to `end`; calls to `tick` in between do the work."""

    def __init__(
        self,
        request: RunRequest,
        paths: RunPaths,
        tell: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        pid: int | None = None,
    ) -> None:
        """`environment` is that of the command, where it is not ours; `pid` is the process, where
        it runs already."""
        self.request = request
        self.paths = paths
        self.has_begun = False
        """Whether there is a tree, and all that `begin` opens for it."""
        self.troubles: dict[str, int] = {}
        self._tell = tell
        self._next_poll = 0.0
        self._read_pss_at = 0.0
        self._polls = 0
        self._allowance_of: int | None = None
        self._gpus = GpuMonitor(os.environ if environment is None else environment, self.trouble)
        self.facts = replace(
            request.facts,
            format=FORMAT,
            name=mask_text(request.name),
            command=request.facts.command or tuple(mask_command(request.command)),
            cwd=str(request.cwd),
            interval_s=request.interval_s,
            watcher=identity_of_self(),
            ending=EndingFacts(Outcome.RUNNING, "it is running"),
            environment=environment_record(request.command, request.cwd, pid),
        )
        self.restart_clock()
        write_facts(paths, self.facts)
        self.sampler = Sampler(paths, request.interval_s, self.trouble)
        self._host, self._shm = HostSensor(), ShmSensor()
        self.sampler.add(self._host)
        self.sampler.add(self._shm)
        self._shm_share: float | None = None
        self._gpus_in_time = self._gpus.reader.wait_until_open(_WAKE_GPUS_S)

    def restart_clock(self) -> None:
        """The run begins now: what came before was our own preparation."""
        self.facts = replace(self.facts, clock=Clock(time.monotonic_ns(), time.time_ns()))

    def begin(
        self,
        root: int,
        adopter: int | None,
        born_ns: int | None,
        exclude: tuple[int, ...] = (),
        is_orphan: Callable[[int], bool] = lambda pid: True,
    ) -> None:
        """Watch a tree; `born_ns` is when it was started, None if it ran before."""
        born_here = born_ns is not None
        self.tree = tree = ProcessTree(root, adopter, exclude, is_orphan)
        self.cgroup = find_cgroup(root)
        self.usage = process.UsageSensor(tree, born_here)
        self.io = process.IoSensor(tree, born_here)
        self._detail = process.DetailSensor(tree, born_here)
        self._pss = process.SharedMemorySensor(tree)
        switches = process.SwitchesSensor(tree, born_here)
        for sensor in (self.usage, self.io, self._detail, switches, self._pss):
            self.sampler.add(sensor, born_ns)
        self._around = (CgroupSensor(self.cgroup), NetworkSensor(tree.network_namespaces))
        for around in self._around:
            self.sampler.add(around)
        self._gpus.processes.pids = lambda: tree.processes
        self._gpus.processes.ran_before = not (born_here and self._gpus_in_time)
        self.sampler.add_reader(self._gpus.reader)
        self.sampler.add(WatcherSensor(self.sampler))
        self.evidence = KernelEvidence.now(self.cgroup)
        asked = self.request
        self.hook = HookMonitor(self.paths, tree, asked.command, asked.hook, asked.hint)
        self.facts = replace(self.facts, root=identity(root))
        self._write_facts()
        self.has_begun = True

    def tick(self, late_s: float) -> None:
        """One sample, and whatever else is due."""
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
        """Read soon how much memory is shared: only then is the sum of all processes true."""
        self.sampler.ask_for(self._pss, self.request.memory_burst_s)

    def last_sample(self) -> None:
        """Once more everything that is cheap, while what ended can still be read."""
        mine = (self._host, self._shm, self.usage, self.io, self._detail)
        self.sampler.read_all(*mine, *self._around)

    def end(self, ending: Ending, survivors: list[str]) -> None:
        self.hook.poll()
        message = self.hook.new_message(at_end=True)
        if message and self.request.announce_hook:
            self._tell(message)
        self.sampler.finish()
        self._gpus.close()
        self.tree.close()
        ended_ns = self.facts.ending.monotonic_ns or time.monotonic_ns()
        stored = EndingFacts(**vars(ending), monotonic_ns=ended_ns)
        self.facts = replace(self.facts, ending=stored, survivors=tuple(survivors))
        self._write_facts()

    def mark_end_time(self, t_ns: int) -> None:
        """When the command ended (writing it all down comes later)."""
        self.facts = replace(self.facts, ending=replace(self.facts.ending, monotonic_ns=t_ns))

    def survivors(self) -> list[str]:
        return [f"{p.name} (pid {p.pid})" for p in self.tree.survivors()]

    def shm_share(self) -> float | None:
        """How full /dev/shm is, or was at its fullest when polled."""
        for reading in self._shm.read():
            used, size = reading.values.get("shm_used"), reading.values.get("shm_size")
            if used is not None and size:
                self._shm_share = max(self._shm_share or 0.0, used / size)
        return self._shm_share

    def oom_kills(self) -> int:
        """Processes of its cgroup that the kernel killed for memory so far."""
        return KernelEvidence.now(self.cgroup).cgroup_kills_since(self.evidence)

    def gpu_oom(self) -> str | None:
        """What a process said that ended, just now, because a GPU had no memory left. One of long
        ago (a trial of many) did not end the command."""
        self.hook.poll()
        since = time.monotonic_ns() - _JUST_NOW_S * 1e9
        return next((mask_text(said) for t, said in self.hook.gpu_ooms if t > since), None)

    def _poll(self) -> None:
        self._polls += 1
        if self.hook.poll():
            self.read_memory()
        message = self.hook.new_message()
        if message and self.request.announce_hook:
            self._tell(message)
        if message or self._gpus.news():
            self._write_facts()
        self.shm_share()
        # How many CPUs the process that trains may use: the command may have narrowed it.
        pid = next((p for p in self.tree.trains if p in self.tree.processes), self.tree.root)
        looks_again = self._polls <= _SETTLED_POLLS or self._polls % _LOOK_AGAIN_POLLS == 0
        if (looks_again or pid != self._allowance_of) and pid in self.tree.processes:
            self._allowance_of = pid
            environment = self.facts.environment
            cpu = replace(environment.cpu, allowed=allowed_cpus(pid, self.cgroup))
            self.facts = replace(self.facts, environment=replace(environment, cpu=cpu))

    def _write_facts(self) -> None:
        self.facts = replace(
            self.facts,
            hook=self.hook.facts(),
            environment=self._gpus.add_to(self.facts.environment),
            sensors=self.sampler.facts(*self._gpus.missing()),
            troubles=self.troubles,
        )
        try:
            write_facts(self.paths, self.facts)
        except OSError as error:
            self.trouble(f"run.json cannot be written ({error.strerror})")

    def trouble(self, text: str) -> None:
        """Tell the user once, and count."""
        self.troubles[text] = self.troubles.get(text, 0) + 1
        if self.troubles[text] == 1:
            self._tell(f"{text}. The command goes on. Folder: {self.paths.folder}")
