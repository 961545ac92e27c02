"""Step events of the hook on a GPU, and the resulting diagnosis."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np
import pytest

from conftest import Finished
from planted import planted_scripts
from stepscope.runs.load import load

pytestmark = pytest.mark.gpu

LOOP = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(32768, 8)), batch_size=16)
model = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for (rows,) in loader:
    optimizer.zero_grad()
    loss = model(rows.cuda(non_blocking=True)).mean()
    torch.cuda._sleep(8_000_000)
    loss.backward()
    optimizer.step()
    if "read" in sys.argv:
        loss.item()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(("word", "ahead"), [("", True), ("read", False)])
def test_device_time_of_steps_and_host_ahead(
    word: str, ahead: bool, watch: Callable[..., Finished], python_file: Callable[[str], str]
) -> None:
    done = watch(sys.executable, python_file(LOOP), word, options=["--quiet"])
    assert done.code == 0, done.err
    (trainer,) = load(done.run).trainers
    steps = trainer.device_steps
    assert len(steps) >= 5
    typical = float(np.median(np.diff(trainer.timeline.steps["t"])))
    assert float(np.median(steps["a"])) == pytest.approx(typical, rel=0.1)
    assert (float((steps["flags"] & 1).mean()) > 0.5) == ahead


@pytest.mark.parametrize("name", ["gpu_tiny_kernels", "gpu_healthy_compute"])
def test_planted_causes_are_found(name: str, watch: Callable[..., Finished]) -> None:
    (script,) = [each for each in planted_scripts("gpu") if each.name == name]
    done = watch(*script.command(fixed=False, seconds=7), options=["--json", "--quiet"])
    assert done.code == 0, done.err
    report = json.loads(done.out.splitlines()[-1])  # after the output of the script
    assert report["diagnosis"]["cause"] == script.cause
