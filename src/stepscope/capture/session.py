"""One watched tree: its sensors, its run folder, and what is known of it so far."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepscope.capture.environment import environment_record
from stepscope.capture.gpuwatch import GpuWatch
from stepscope.capture.hookwatch import HookWatch
from stepscope.capture.outcome import Evidence
from stepscope.capture.sampler import Sampler, WatcherSensor
from stepscope.errors import CannotWatch
from stepscope.inject.events import GPU_OOM
from stepscope.records import Ending, Outcome
from stepscope.runs import runfile
from stepscope.runs.events import read_folder
from stepscope.runs.masking import mask_command, mask_text
from stepscope.runs.paths import FORMAT, RunPaths, make_run_folder, new_run_folder
from stepscope.sensors.cgroup import CgroupSensor, allowed_cpus, find_cgroup
from stepscope.sensors.host import HostSensor
from stepscope.sensors.network import NetworkSensor
from stepscope.sensors.process import (
    DetailSensor,
    IoSensor,
    SharedMemorySensor,
    SwitchesSensor,
    UsageSensor,
)
from stepscope.sensors.shm import ShmSensor
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


SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.02, 60.0


def check_interval(seconds: float) -> None:
    """CannotWatch unless one can sample at this pace."""
    if not SHORTEST_INTERVAL_S <= seconds <= LONGEST_INTERVAL_S:
        raise CannotWatch(f"An interval of {seconds} s is not possible", "Give 0.02 to 60 seconds")


def next_tick(planned: float, interval_s: float) -> float:
    """The next time on the grid of samples; ticks that are already past are left out."""
    now = time.monotonic()
    return planned + interval_s * max(1, int((now - planned) / interval_s) + 1)


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise CannotWatch(
            "The current folder does not exist any more", "Change to another: cd ~"
        ) from None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to watch and how."""

    name: str
    command: list[str]
    interval_s: float
    out: Path
    hook: bool = True
    hint: str = "use stepscope.mark()"
    """What else the user can do where the hook attaches to nothing."""
    cwd: Path = dataclasses.field(default_factory=_current_folder)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What else run.json should say from the start."""
    memory_burst_s: float = 0.08
    """CPU time that readings of shared memory may take beyond their budget, when processes come."""
    folder: Path | None = None
    """The run folder itself, where it is not to be a new one in `out`. It must not exist."""


def allow_many_descriptors() -> None:
    """We keep some per process of the tree. After the start of a command: it keeps its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def prepare_folder(plan: Plan) -> RunPaths:
    """Make the run folder, or say why it cannot be made."""
    try:
        if plan.folder is not None:
            return make_run_folder(plan.folder)
        return new_run_folder(plan.out, mask_text(plan.name))
    except OSError as error:
        raise CannotWatch(
            f"The run folder cannot be made in {plan.folder or plan.out}: {error.strerror}",
            "Choose another place with --out DIR",
        ) from None


class Session:
    """Watches one tree, from `begin` to `end`; calls to `tick` in between do the work."""

    def __init__(
        self,
        plan: Plan,
        paths: RunPaths,
        tell: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is that of the command, where it is not ours."""
        self.plan = plan
        self.paths = paths
        self.facts: dict[str, Any] = {}
        self._tell = tell
        self.troubles: dict[str, int] = {}
        self._next_poll = 0.0
        self._read_pss_at = 0.0
        self._polls = 0
        self._allowance_of: int | None = None
        self._gpus = GpuWatch(os.environ if environment is None else environment, self.trouble)
        self._write_first_facts()
        self.sampler = Sampler(paths, plan.interval_s, self.trouble)
        self._host = HostSensor()
        self.sampler.add(self._host)
        self._shm = ShmSensor()
        self.sampler.add(self._shm)
        self._shm_share: float | None = None
        self._gpus.aside.wait_until_open(_WAKE_GPUS_S)
        self._gpus_in_time = self._gpus.aside.is_open

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
        self.tree = ProcessTree(root, adopter, exclude, is_orphan)
        self.usage = UsageSensor(self.tree, born_here)
        self.io = IoSensor(self.tree, born_here)
        self.detail = DetailSensor(self.tree, born_here)
        self.pss = SharedMemorySensor(self.tree)
        for sensor in (
            self.usage,
            self.io,
            self.detail,
            SwitchesSensor(self.tree, born_here),
            self.pss,
        ):
            self.sampler.add(sensor, born_ns)
        self.cgroup = find_cgroup(root)
        self._around = (CgroupSensor(self.cgroup), NetworkSensor(self.tree.network_namespaces))
        for around in self._around:
            self.sampler.add(around)
        self._gpus.family.pids = lambda: self.tree.processes
        self._gpus.family.ran_before = not (born_here and self._gpus_in_time)
        self.sampler.add_aside(self._gpus.aside)
        self.sampler.add(WatcherSensor(self.sampler))
        self.evidence = Evidence.now(self.cgroup)
        self.hookwatch = HookWatch(
            self.paths, self.tree, self.plan.command, self.plan.hook, self.plan.hint
        )
        self.facts["root"] = runfile.identity(root)
        self._write_facts()

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
        self.sampler.ask_for(self.pss, self.plan.memory_burst_s)

    def last_sample(self) -> None:
        """Once more everything that is cheap, while what ended can still be read."""
        self.sampler.read_all(self.usage, self.io, self.detail, self._shm, self._host)
        self.sampler.read_all(*self._around)

    def end(self, ending: Ending, survivors: list[str]) -> None:
        """Write everything down."""
        self.hookwatch.poll()
        message = self.hookwatch.last_message()
        if message:
            self._tell(message)
        self.sampler.finish()
        self._gpus.close()
        self.tree.close()
        self.facts["ending"] = {
            **dataclasses.asdict(ending),
            "monotonic_ns": self.facts["ending"].get("monotonic_ns", time.monotonic_ns()),
        }
        self.facts["survivors"] = survivors
        self._write_facts()

    def mark_end_time(self, t_ns: int) -> None:
        """When the command ended (writing it all down comes later)."""
        self.facts["ending"]["monotonic_ns"] = t_ns

    def shm_share(self) -> float | None:
        """How full /dev/shm is, or was at its fullest when polled."""
        readings = self._shm.read()
        for reading in readings:
            used, size = reading.values.get("shm_used"), reading.values.get("shm_size")
            if used is not None and size:
                self._shm_share = max(self._shm_share or 0.0, used / size)
        return self._shm_share

    def gpu_oom(self) -> str | None:
        """What a process said that ended, just now, because a GPU had no memory left. One of long
        ago (a trial of many) did not end the command."""
        with contextlib.suppress(OSError):
            for process in read_folder(self.paths.events):
                for record in process.of(GPU_OOM):
                    if time.monotonic_ns() - int(record["t"]) < _JUST_NOW_S * 1e9:
                        return mask_text(process.name(record["a"]))
        return None

    def _poll(self) -> None:
        self._polls += 1
        if self.hookwatch.poll():
            self.read_memory()
        message = self.hookwatch.new_message()
        if message:
            self._tell(message)
        if message or self._gpus.news():
            self._write_facts()
        self.shm_share()
        self._learn_allowance()

    def _learn_allowance(self) -> None:
        """How many CPUs the process that trains may use: the command may have narrowed it."""
        pid = next((p for p in self.tree.trains if p in self.tree.processes), self.tree.root)
        settled = self._polls > _SETTLED_POLLS and self._polls % _LOOK_AGAIN_POLLS
        news = not settled or pid != self._allowance_of
        if news and pid in self.tree.processes:
            self._allowance_of = pid
            cpu = self.facts["environment"].setdefault("cpu", {})
            cpu["allowed"] = allowed_cpus(pid, self.cgroup)

    def _write_first_facts(self) -> None:
        wall, monotonic = time.time_ns(), time.monotonic_ns()
        self.facts = {
            "format": FORMAT,
            "name": mask_text(self.plan.name),
            "command": mask_command(self.plan.command),
            "cwd": str(self.plan.cwd),
            "interval_s": self.plan.interval_s,
            "clock": {"monotonic_ns": monotonic, "wall_ns": wall},
            "watcher": runfile.identity_of_self(),
            "ending": {"outcome": Outcome.RUNNING, "reason": "it is running"},
            "environment": environment_record(self.plan.command, self.plan.cwd, None),
            **self.plan.facts,
        }
        runfile.write_facts(self.paths, self.facts)

    def restart_clock(self) -> None:
        """The run begins now: what came before was our own preparation."""
        self.facts["clock"] = {"monotonic_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}

    def _write_facts(self) -> None:
        self.facts["hook"] = self.hookwatch.facts()
        self.facts["environment"].update(self._gpus.describe())
        self.facts["sensors"] = {
            "missing": {**self._gpus.missing(), **self.sampler.missing()},
            "estimated": self.sampler.estimated(),
            "remarks": self.sampler.remarks(),
            "costs": self.sampler.costs(),
            "rows_dropped": self.sampler.rows_dropped(),
        }
        self.facts["troubles"] = self.troubles
        try:
            runfile.write_facts(self.paths, self.facts)
        except OSError as error:
            self.trouble(f"run.json cannot be written ({error.strerror})")

    def trouble(self, text: str) -> None:
        """Tell the user once, and count."""
        self.troubles[text] = self.troubles.get(text, 0) + 1
        if self.troubles[text] == 1:
            self._tell(f"{text}. The command goes on. Folder: {self.paths.folder}")
