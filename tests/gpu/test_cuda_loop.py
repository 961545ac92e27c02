"""A CUDA training loop under watch: steps exact, and nothing of it disturbed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Finished

pytestmark = pytest.mark.gpu

TRAIN = Path(__file__).parents[2] / "examples" / "plain_loop" / "train.py"


def test_a_cuda_loop_is_seen(watch: Callable[..., Finished]) -> None:
    done = watch(sys.executable, str(TRAIN), "--fraction", "0.5", "--epochs", "3", "--workers", "4",
                 "--batch-size", "256")  # fmt: skip

    assert done.code == 0, done.err
    assert "hook: DataLoader, optimizer" in done.err
    summary = done.run.summary()
    assert [row.steps for row in summary.epochs] == [118] * 3
    assert [row.samples for row in summary.epochs] == [30_000] * 3
    assert {"main", "worker"} <= set(summary.roles)
    assert done.run.facts["environment"]["gpus"], "the GPU is in the record of the environment"
