"""How a command ended, from its status and what the kernel counted."""

from __future__ import annotations

import signal

import pytest

from stepscope.capture.outcome import KernelEvidence, judge

NONE = KernelEvidence(0, 0)


def status(code: int = 0, by: int = 0) -> int:
    return code << 8 | by


@pytest.mark.parametrize(
    ("wait_status", "after", "shm", "asked", "outcome", "words"),
    [
        (status(0), NONE, 0.0, False, "ok", "normally"),
        (status(0), KernelEvidence(1, 1), 0.0, False, "ok", "normally"),
        (status(3), NONE, 0.0, False, "crashed", "exit code 3"),
        (status(by=signal.SIGKILL), NONE, 0.0, False, "crashed", "somebody sent it"),
        (status(by=signal.SIGSEGV), NONE, 0.0, False, "crashed", "native code"),
        (status(by=signal.SIGKILL), KernelEvidence(1, 1), 0.0, False, "host_oom", "1 OOM kill"),
        # A killed loader worker ends the main process with an exit code.
        (status(1), KernelEvidence(2, 2), 0.0, False, "host_oom", "2 OOM kills"),
        # Somebody else's process, elsewhere on the machine.
        (status(1), KernelEvidence(0, 1), 0.0, False, "crashed", "exit code 1"),
        (status(by=signal.SIGINT), NONE, 0.0, True, "interrupted", "as it was asked"),
        (status(130), NONE, 0.0, True, "interrupted", "as it was asked"),
        (status(by=signal.SIGTERM), NONE, 0.0, False, "crashed", "SIGTERM"),
        (status(1), NONE, 1.0, False, "shm_full", "/dev/shm 100% full"),
        (status(by=signal.SIGBUS), NONE, 0.99, False, "shm_full", "99% full"),
    ],
)
def test_judge(
    wait_status: int, after: KernelEvidence, shm: float, asked: bool, outcome: str, words: str
) -> None:
    ending = judge(wait_status, NONE, after, shm, asked)
    assert ending.outcome == outcome
    assert words in ending.reason


def test_without_a_cgroup_the_machine_is_asked() -> None:
    ending = judge(status(by=9), KernelEvidence(None, 4), KernelEvidence(None, 5), None, False)
    assert ending.outcome == "host_oom"
    assert "the machine counted 1 OOM kill" in ending.reason
