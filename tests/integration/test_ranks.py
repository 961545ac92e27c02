"""Distributed trials: data sharding, gradient averaging and clean exit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import Tried

Trial = Callable[..., Tried]

WITH_GRADIENTS = """
import os
import torch
from pathlib import Path
from stepscope.workloads.frameworks.torch.models import small_cnn

class Saving(torch.optim.SGD):
    def step(self, *arguments):
        rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        file = Path(__file__).with_name(f"of{world}-{rank}.pt")
        if not file.exists():
            (group,) = self.param_groups
            torch.save([p.grad.clone() for p in group["params"]], file)
        return super().step(*arguments)

def workload(seed):
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {
        "model": small_cnn(32, 10),
        "loss": torch.nn.functional.cross_entropy,
        "data": torch.utils.data.TensorDataset(images, torch.arange(64)% 10),
        "optimizer": lambda parameters: Saving(parameters, lr=0.1),
    }
"""


def test_gradients_match_a_single_process(trial: Trial, tmp_path: Path) -> None:
    """Two ranks with batch 4 and accumulation match one process with the global batch."""
    file = tmp_path / "gradients.py"
    file.write_text(WITH_GRADIENTS)
    alone = trial(f"{file}:workload", "--batch-size", "16", "--steps", "8", "--name", "alone")
    assert alone.code == 0, alone.err
    together = trial(
        f"{file}:workload",
        "--batch-size",
        "4",
        "--accumulate",
        "2",
        "--ranks",
        "2",
        "--seconds",
        "2",
        "--cpus",
        "2",
        "--name",
        "together",
    )
    assert together.code == 0, together.err
    whole = torch.load(tmp_path / "of1-0.pt")
    for rank in (0, 1):
        for expected, got in zip(whole, torch.load(tmp_path / f"of2-{rank}.pt"), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    _check_both_ranks(together)


def _check_both_ranks(done: Tried) -> None:
    result = done.told
    assert result["global_batch"] == 16 and result["rank_imbalance"] >= 1
    (folder,) = (f for f in done.folders if "together" in f.name)
    ranks = [json.loads((folder / "trial" / f"rank{n}.json").read_text()) for n in (0, 1)]
    assert all(rank["done"] for rank in ranks)
    assert ranks[0]["steps"] == ranks[1]["steps"] == result["steps"] >= 8
    assert ranks[0]["threads"] == 1
    facts = json.loads((folder / "run.json").read_text())
    assert facts["limits"]["cpus"]["threads"] == 1
    from stepscope.opened_run import open_run

    run = open_run(folder)
    assert {"rank0", "rank1"} <= set(run.summary().roles)
    assert {process.rank for process in run.processes} >= {0, 1}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise AssertionError('rank 1 fails')", "rank 1 fails"),
        ("os.abort()", "rank 1 was killed by SIGABRT"),
    ],
)
def test_failed_rank_ends_the_trial(
    trial: Trial, own: Callable[..., str], end: str, reason: str
) -> None:
    """The reason names the failed rank, not one that the launcher ended."""
    fails = own(step=f"if os.environ['RANK'] == '1': {end}")
    done = trial(fails, "--ranks", "2", "--seconds", "600", "--workers", "1")
    assert done.code == 14, done.err
    assert reason in done.told["reason"]


@pytest.mark.long
def test_ten_consecutive_trials_exit_cleanly(trial: Trial) -> None:
    for number in range(10):
        done = trial(
            "cnn",
            "--ranks",
            "2",
            "--samples",
            "512",
            "--steps",
            "10",
            "--workers",
            "1",
            "--name",
            f"n{number}",
        )
        assert done.code == 0, done.err
        folder = sorted(done.runs.glob(f"*_n{number}_*"))[0]
        stderr = (folder / "stderr.log").read_text()
        assert "terminate called" not in stderr and "Error" not in stderr, stderr
