"""Determine the outcome of a command from its wait status and the kernel's counters."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from stepscope.records import NATIVE_CRASH_SIGNALS, ExitStatus, Outcome
from stepscope.sensors import procfs
from stepscope.sensors.cgroup import Cgroup

SHM_FULL_SHARE = 0.98
"""Use of /dev/shm from which a failure is attributed to it."""


@dataclass(frozen=True)
class KernelEvidence:
    """The kernel's counts of OOM kills at one moment. None if a count is not available."""

    cgroup_kills: int | None
    machine_kills: int | None

    @classmethod
    def now(cls, cgroup: Cgroup | None) -> KernelEvidence:
        return cls(cgroup.oom_kills() if cgroup else None, procfs.oom_kills())

    def cgroup_kills_since(self, before: KernelEvidence) -> int:
        """Return the number of OOM kills in the cgroup since `before`."""
        if before.cgroup_kills is None or self.cgroup_kills is None:
            return 0
        return max(0, self.cgroup_kills - before.cgroup_kills)


def judge(
    status: int,
    before: KernelEvidence,
    after: KernelEvidence,
    shm_share: float | None,
    termination_requested: bool,
    gpu_oom: str | None = None,
) -> ExitStatus:
    """Return the exit status of a command by its wait status. `gpu_oom` is the GPU out-of-memory
    error that one of its processes reported."""
    code = os.waitstatus_to_exitcode(status)
    name = signal_name(-code) if code < 0 else None
    exit_code = None if code < 0 else code
    if code == 0:
        return ExitStatus(Outcome.OK, "exited normally", 0)
    reason = f"killed by {name}" if name else f"exit code {code}"
    oom_kills = _oom_kills(before, after)
    counts = {
        "cgroup_oom_kills_before": before.cgroup_kills,
        "cgroup_oom_kills_after": after.cgroup_kills,
        "machine_oom_kills_before": before.machine_kills,
        "machine_oom_kills_after": after.machine_kills,
    }
    if oom_kills and name == "SIGKILL":
        reason = f"killed by the kernel's OOM killer ({oom_kills})"
        return ExitStatus(Outcome.HOST_OOM, reason, exit_code, name, counts)
    if oom_kills and code > 0:
        reason = f"{reason}; the kernel's OOM killer killed one of its processes ({oom_kills})"
        return ExitStatus(Outcome.HOST_OOM, reason, exit_code, name, counts)
    if termination_requested and (name in _TERMINATION_SIGNALS or code in _TERMINATION_CODES):
        reason = f"{reason} after a termination signal" if code > 0 else reason
        return ExitStatus(Outcome.INTERRUPTED, reason, exit_code, name)
    if gpu_oom and code == 1:  # the exit code of Python after an uncaught exception
        reason = f"{reason}; {gpu_oom.partition('. ')[0]}"
        return ExitStatus(Outcome.GPU_OOM, reason, exit_code, name, {"message": gpu_oom})
    if shm_share is not None and shm_share >= SHM_FULL_SHARE and (code > 0 or name == "SIGBUS"):
        reason = f"{reason} while /dev/shm was {shm_share:.0%} full"
        return ExitStatus(Outcome.SHM_FULL, reason, exit_code, name, {"shm_share": shm_share})
    if name == "SIGKILL":
        reason += "; no OOM kill was recorded, so another process probably sent the signal"
    elif name in NATIVE_CRASH_SIGNALS:
        reason += ": a crash in native code"
    return ExitStatus(Outcome.CRASHED, reason, exit_code, name, counts)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between SIGRTMIN and SIGRTMAX
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


_TERMINATION_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_TERMINATION_CODES = (129, 130, 131, 143, 1)
"""Exit codes of shells and of Python's KeyboardInterrupt handlers after these signals."""


def oom_kills_text(where: str, kills: int) -> str:
    return f"{kills} OOM {'kill was' if kills == 1 else 'kills were'} recorded {where}"


def _oom_kills(before: KernelEvidence, after: KernelEvidence) -> str | None:
    """Describe the OOM kills between two moments. The machine's count includes unrelated
    processes, so it is used only if the cgroup has no count."""
    for where, then, now in (
        ("in its cgroup", before.cgroup_kills, after.cgroup_kills),
        ("on the machine", before.machine_kills, after.machine_kills),
    ):
        if then is not None and now is not None:
            return oom_kills_text(where, now - then) if now > then else None
    return None
