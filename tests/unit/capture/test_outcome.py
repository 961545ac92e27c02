"""The exit status of a command, from its wait status and the kernel's counters."""

from __future__ import annotations

import signal

import pytest

from stepscope.capture.outcome import KernelEvidence, judge

NONE = KernelEvidence(0, 0)


def status(code: int = 0, by: int = 0) -> int:
    return code << 8 | by


@pytest.mark.parametrize(
    ("wait_status", "after", "shm", "requested", "outcome", "words"),
    [
        (status(0), NONE, 0.0, False, "ok", "exited normally"),
        (status(0), KernelEvidence(1, 1), 0.0, False, "ok", "exited normally"),
        (status(3), NONE, 0.0, False, "crashed", "exit code 3"),
        (
            status(by=signal.SIGKILL),
            NONE,
            0.0,
            False,
            "crashed",
            "another process probably sent the signal",
        ),
        (status(by=signal.SIGSEGV), NONE, 0.0, False, "crashed", "native code"),
        (
            status(by=signal.SIGKILL),
            KernelEvidence(1, 1),
            0.0,
            False,
            "host_oom",
            "OOM killer (1 OOM kill was recorded in its cgroup)",
        ),
        # A killed loader worker ends the main process with an exit code.
        (status(1), KernelEvidence(2, 2), 0.0, False, "host_oom", "2 OOM kills"),
        # An unrelated process elsewhere on the machine.
        (status(1), KernelEvidence(0, 1), 0.0, False, "crashed", "exit code 1"),
        (status(by=signal.SIGINT), NONE, 0.0, True, "interrupted", "killed by SIGINT"),
        (status(130), NONE, 0.0, True, "interrupted", "130 after a termination signal"),
        (status(by=signal.SIGTERM), NONE, 0.0, False, "crashed", "SIGTERM"),
        (status(1), NONE, 1.0, False, "shm_full", "/dev/shm was 100% full"),
        (status(by=signal.SIGBUS), NONE, 0.99, False, "shm_full", "99% full"),
    ],
)
def test_judge(
    wait_status: int, after: KernelEvidence, shm: float, requested: bool, outcome: str, words: str
) -> None:
    exit_status = judge(wait_status, NONE, after, shm, requested)
    assert exit_status.outcome == outcome
    assert words in exit_status.reason


def test_machine_count_is_used_without_a_cgroup() -> None:
    exit_status = judge(status(by=9), KernelEvidence(None, 4), KernelEvidence(None, 5), None, False)
    assert exit_status.outcome == "host_oom"
    assert "1 OOM kill was recorded on the machine" in exit_status.reason
