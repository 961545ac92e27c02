"""How a command ended, and why: from its status and from what the kernel counted meanwhile."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from stepscope.records import Ending, Outcome
from stepscope.sensors.cgroup import Cgroup

_FULL = 0.98


@dataclass(frozen=True)
class Evidence:
    """Counts of the kernel that tell an OOM kill or a full /dev/shm from other deaths."""

    cgroup_kills: int | None
    machine_kills: int | None

    @classmethod
    def now(cls, cgroup: Cgroup | None) -> Evidence:
        return cls(cgroup.oom_kills() if cgroup else None, _machine_kills())


def judge(
    status: int,
    before: Evidence,
    after: Evidence,
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
    if killed and (code > 0 or name == "SIGKILL"):
        return Ending(
            Outcome.HOST_OOM, f"{how}; {killed}", exit_code, name, _as_dict(before, after)
        )
    if asked_to_end and (name in _ASKING or code in _ASKING_CODES):
        return Ending(Outcome.INTERRUPTED, f"{how}, as it was asked to", exit_code, name)
    if gpu_oom and code == 1:  # as Python ends with an error that nobody caught
        reason = f"{how}; {gpu_oom.partition('. ')[0]}"
        return Ending(Outcome.GPU_OOM, reason, exit_code, name, {"message": gpu_oom})
    if shm_share is not None and shm_share >= _FULL and (code > 0 or name == "SIGBUS"):
        reason = f"{how}, with /dev/shm {shm_share:.0%} full"
        return Ending(Outcome.SHM_FULL, reason, exit_code, name, {"shm_share": shm_share})
    return Ending(Outcome.CRASHED, _in_words(how, name), exit_code, name, _as_dict(before, after))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time ones between the first and the last
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


_ASKING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_ASKING_CODES = (129, 130, 131, 143, 1)
"""How shells and Python's KeyboardInterrupt handlers report such an end."""


def _killed(before: Evidence, after: Evidence) -> str | None:
    """What the OOM killer did, in words. The machine's count is asked only without a cgroup's:
    it also counts the processes of others."""
    if before.cgroup_kills is not None and after.cgroup_kills is not None:
        count = after.cgroup_kills - before.cgroup_kills
        return f"its cgroup counted {count} OOM kill{'s' * (count > 1)}" if count > 0 else None
    if before.machine_kills is not None and after.machine_kills is not None:
        count = after.machine_kills - before.machine_kills
        return f"the machine counted {count} OOM kill{'s' * (count > 1)}" if count > 0 else None
    return None


def _in_words(how: str, name: str | None) -> str:
    if name == "SIGKILL":
        return f"{how}; no OOM kill was counted, so somebody sent it"
    if name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        return f"{how}: a crash in native code"
    return how


def _as_dict(before: Evidence, after: Evidence) -> dict[str, int | None]:
    return {
        "cgroup_oom_kills_before": before.cgroup_kills,
        "cgroup_oom_kills_after": after.cgroup_kills,
        "machine_oom_kills_before": before.machine_kills,
        "machine_oom_kills_after": after.machine_kills,
    }


def _machine_kills() -> int | None:
    """OOM kills on the whole machine, of any cgroup."""
    try:
        for line in Path("/proc/vmstat").read_bytes().splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None
