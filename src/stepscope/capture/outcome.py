"""How a command ended, and why: from its status and from what the kernel counted meanwhile."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from stepscope.records import NATIVE_CRASH_SIGNALS, Ending, Outcome
from stepscope.sensors import procfs
from stepscope.sensors.cgroup import Cgroup

SHM_FULL_SHARE = 0.98
"""Of /dev/shm in use, above which a death is put down to it."""


@dataclass(frozen=True)
class KernelEvidence:
    """Counts of the kernel that tell an OOM kill or a full /dev/shm from other deaths."""

    cgroup_kills: int | None
    machine_kills: int | None

    @classmethod
    def now(cls, cgroup: Cgroup | None) -> KernelEvidence:
        return cls(cgroup.oom_kills() if cgroup else None, procfs.oom_kills())

    def cgroup_kills_since(self, before: KernelEvidence) -> int:
        """Processes of the cgroup that were killed for memory meanwhile."""
        if before.cgroup_kills is None or self.cgroup_kills is None:
            return 0
        return max(0, self.cgroup_kills - before.cgroup_kills)


def judge(
    status: int,
    before: KernelEvidence,
    after: KernelEvidence,
    shm_share: float | None,
    asked_to_end: bool,
    gpu_oom: str | None = None,
) -> Ending:
    """The outcome of a command that ended with a wait status; `gpu_oom` is the error by which one
    of its processes said that a GPU had no memory left."""
    code = os.waitstatus_to_exitcode(status)
    name = signal_name(-code) if code < 0 else None
    exit_code = None if code < 0 else code
    if code == 0:
        return Ending(Outcome.OK, "the command ended normally", 0)
    how = f"killed by {name}" if name else f"exit code {code}"
    killed = _killed(before, after)
    counts = {
        "cgroup_oom_kills_before": before.cgroup_kills,
        "cgroup_oom_kills_after": after.cgroup_kills,
        "machine_oom_kills_before": before.machine_kills,
        "machine_oom_kills_after": after.machine_kills,
    }
    if killed and (code > 0 or name == "SIGKILL"):
        return Ending(Outcome.HOST_OOM, f"{how}; {killed}", exit_code, name, counts)
    if asked_to_end and (name in _ASKING or code in _ASKING_CODES):
        return Ending(Outcome.INTERRUPTED, f"{how}, as it was asked to", exit_code, name)
    if gpu_oom and code == 1:  # as Python ends with an error that nobody caught
        reason = f"{how}; {gpu_oom.partition('. ')[0]}"
        return Ending(Outcome.GPU_OOM, reason, exit_code, name, {"message": gpu_oom})
    if shm_share is not None and shm_share >= SHM_FULL_SHARE and (code > 0 or name == "SIGBUS"):
        reason = f"{how}, with /dev/shm {shm_share:.0%} full"
        return Ending(Outcome.SHM_FULL, reason, exit_code, name, {"shm_share": shm_share})
    if name == "SIGKILL":
        how += "; no OOM kill was counted, so somebody sent it"
    elif name in NATIVE_CRASH_SIGNALS:
        how += ": a crash in native code"
    return Ending(Outcome.CRASHED, how, exit_code, name, counts)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time ones between the first and the last
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


_ASKING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_ASKING_CODES = (129, 130, 131, 143, 1)
"""How shells and Python's KeyboardInterrupt handlers report such an end."""


def oom_kills_text(counted_by: str, kills: int) -> str:
    return f"{counted_by} counted {kills} OOM kill{'' if kills == 1 else 's'}"


def _killed(before: KernelEvidence, after: KernelEvidence) -> str | None:
    """What the OOM killer did, in words. The machine's count is asked only without a cgroup's:
    it also counts the processes of others."""
    for counted_by, then, now in (
        ("its cgroup", before.cgroup_kills, after.cgroup_kills),
        ("the machine", before.machine_kills, after.machine_kills),
    ):
        if then is not None and now is not None:
            return oom_kills_text(counted_by, now - then) if now > then else None
    return None
