"""The outcome of a trial from its evidence, in order of precedence."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from stepscope.capture.outcome import KernelEvidence
from stepscope.records import Outcome
from stepscope.records.trial import RankError, RankFacts
from stepscope.trials.outcome import Stopped, TrialEvidence, judge_trial, last_lines

FAILED = 1 << 8
DONE = RankFacts(done=True)


def error(kind: str, message: str, at: int = 0, rank: int = 0) -> RankFacts:
    summary = f"RuntimeError: {message}"
    rank_error = RankError(kind, "RuntimeError", message, summary, monotonic_ns=at)
    return RankFacts(rank, 31 + rank, error=rank_error)


GOOD = TrialEvidence(0, [DONE], 1)


def test_done() -> None:
    assert judge_trial(GOOD).outcome is Outcome.OK
    assert judge_trial(replace(GOOD, kills=1)).outcome is Outcome.OK, "training completed"


def test_missing_rank_is_a_crash() -> None:
    assert judge_trial(replace(GOOD, expected_ranks=2)).outcome is Outcome.CRASHED


def test_early_exit_with_code_0_is_a_crash() -> None:
    exit_status = judge_trial(TrialEvidence(0, [RankFacts()], 1))
    assert (
        exit_status.outcome is Outcome.CRASHED and "before training finished" in exit_status.reason
    )


@pytest.mark.parametrize(
    "message",
    [
        "DataLoader worker (PID 5) is killed by signal: Bus error. It is possible that dataloader's"
        " workers are out of shared memory. Please try to raise your shared memory limit.",
        "unable to write to file </torch_5_4_0>: No space left on device (28)",
        "unable to allocate shared memory(shm) for file </torch_1_2_0>: "
        "Resource temporarily unavailable (11)",
        "[Errno 28] No space left on device: '/dev/shm/psm_1'",
    ],
)
def test_shared_memory_errors(message: str) -> None:
    exit_status = judge_trial(
        TrialEvidence(FAILED, [error("error", f"Caught RuntimeError.\n{message}")], 1)
    )
    assert exit_status.outcome is Outcome.SHM_FULL


def test_full_disk_is_not_full_shared_memory() -> None:
    rank = error("error", "[Errno 28] No space left on device: '/data/checkpoint.pt'")
    assert judge_trial(TrialEvidence(FAILED, [rank], 1)).outcome is Outcome.CRASHED


def test_out_of_memory_takes_precedence() -> None:
    killed = TrialEvidence(FAILED, [error("error", "worker killed by signal: Killed")], 1, kills=1)
    assert judge_trial(killed).outcome is Outcome.HOST_OOM
    stalled = replace(killed, stopped=Stopped(Outcome.TIMEOUT, "no step"))
    assert judge_trial(stalled).outcome is Outcome.HOST_OOM
    interrupted = replace(killed, stopped=Stopped(Outcome.INTERRUPTED, "Ctrl-C"))
    assert judge_trial(interrupted).outcome is Outcome.INTERRUPTED


def test_oom_kill_in_our_own_cgroup() -> None:
    status = signal.SIGKILL.value
    seen = TrialEvidence(
        status, [], 1, before=KernelEvidence(3, None), after=KernelEvidence(4, None)
    )
    assert judge_trial(seen).outcome is Outcome.HOST_OOM
    uncounted = replace(seen, after=KernelEvidence(3, None))
    assert judge_trial(uncounted).outcome is Outcome.CRASHED


def test_gpu_oom_has_the_message_of_the_allocator() -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 4 GiB"
    exit_status = judge_trial(
        TrialEvidence(FAILED, [error("gpu_oom", message)], 1, stderr="a\n\nb\n")
    )
    assert exit_status.outcome is Outcome.GPU_OOM and exit_status.reason == "CUDA out of memory"
    assert exit_status.evidence == {"message": message, "stderr": ["a", "b"]}


def test_first_failed_rank_is_the_reason() -> None:
    ranks = [
        error("error", "Connection closed by peer", at=9),
        error("error", "mine", at=5, rank=1),
    ]
    assert judge_trial(TrialEvidence(FAILED, ranks, 2)).reason == "RuntimeError: mine"


def test_killed_rank_is_named() -> None:
    ranks = [RankFacts(0), error("error", "closed by peer", rank=1)]
    seen = TrialEvidence(FAILED, ranks, 2)
    assert judge_trial(seen).reason == "rank 0 exited without an error message"
    log = "[0]:\n  time : now\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 31)\n"
    assert judge_trial(replace(seen, stderr=log)).reason == "rank 0 was killed by SIGKILL"


LAUNCHER = """W api.py:1028] Sending process 31 closing signal SIGTERM
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 31)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 32)
"""


def test_rank_ended_by_the_launcher_is_not_the_cause() -> None:
    """The launcher may end it before it reports an error."""
    ended = RankFacts(0, 31)
    failed = error("error", "mine", rank=1)
    seen = TrialEvidence(FAILED, [ended, failed], 2, stderr=LAUNCHER.format(code=1))
    assert judge_trial(seen).reason == "RuntimeError: mine"
    quiet = replace(seen, stderr=seen.stderr.partition("\n")[2])
    assert judge_trial(quiet).reason == "RuntimeError: mine"
    aborted = RankFacts(1, 32)
    abort = replace(seen, ranks=[ended, aborted], stderr=LAUNCHER.format(code=-6))
    assert judge_trial(abort).reason == "rank 1 was killed by SIGABRT"


def test_failed_host_allocation() -> None:
    rank = error("host_oom", "[enforce fail] DefaultCPUAllocator: can't allocate memory")
    assert judge_trial(TrialEvidence(FAILED, [rank], 1)).outcome is Outcome.HOST_OOM


def test_full_disk_of_the_run_folder_is_named() -> None:
    """An error that a rank has written takes precedence."""
    full = TrialEvidence(FAILED, [RankFacts()], 1, disk_is_full=True)
    assert "the disk with the run folder is full" in judge_trial(full).reason
    reported = replace(full, ranks=[error("error", "mine")])
    assert judge_trial(reported).reason == "RuntimeError: mine"


def test_native_crash() -> None:
    exit_status = judge_trial(TrialEvidence(signal.SIGSEGV.value, [], 1))
    assert exit_status.outcome is Outcome.CRASHED and exit_status.signal == "SIGSEGV"


def test_last_lines() -> None:
    assert last_lines("\n".join(map(str, range(50))), 3) == ["47", "48", "49"]
    assert last_lines("") == []
