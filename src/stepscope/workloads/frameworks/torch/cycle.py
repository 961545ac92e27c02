"""The rest of a training's cycle, for those who ask what memory it takes: an evaluation, the last
and smaller batch of an epoch, and steps again. Memory runs out in all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepscope.workloads.frameworks.torch.feed import map_tensors
from stepscope.workloads.frameworks.torch.samples import bytes_in, tensors_in
from stepscope.workloads.reporting import RankReport, failure_kind

AGAIN = 2
"""Steps after the smaller batch."""
_PART = 3, 8
"""The last batch of an epoch, as a part of the others: any will do."""
_LEAST_PART = 2
"""One sample alone is refused by batch normalisation, which is no matter of memory."""


@dataclass
class HostMemory:
    """What this process holds that the kernel cannot take back: all but the pages of files."""

    kept: list[int] = field(default_factory=list)
    """Bytes after each step."""
    before: int = 0
    peak: int = 0

    def begin(self) -> None:
        """Before the first step: the data set, the model and the framework are there."""
        self.before = _held()[0]
        with contextlib.suppress(OSError):  # forget the peak of what was before
            Path("/proc/self/clear_refs").write_text("5")

    def note(self) -> None:
        """After a step. The kernel keeps the peak of all pages: those of files stay as they are."""
        held, peak = _held()
        self.kept.append(held)
        self.peak = max(self.peak, peak)

    def facts(self) -> dict[str, Any]:
        return {"before": self.before, "peak": self.peak, "kept": self.kept}


def _held() -> tuple[int, int]:
    """Now, and at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {
        name: int(size.split()[0]) << 10
        for name, _, size in (line.partition(":") for line in lines)
        if name in ("VmHWM", "VmRSS", "RssFile")
    }
    files = sizes.get("RssFile", 0)
    return sizes["VmRSS"] - files, sizes["VmHWM"] - files


@dataclass(frozen=True)
class Cycle:
    """What follows the steps of a trial."""

    batch: Callable[[], Any]
    """The next one, where it is computed."""
    train: Callable[[Any], None]
    """One whole step with a batch."""
    evaluate: Callable[[Any], None]
    step: Callable[[], None]
    """One as all those before."""
    size: int

    def run(self, report: RankReport) -> None:
        with report.phase("evaluation"):
            self._evaluate(self.batch(), report)
        with report.phase("smaller batch"):
            self._train_smaller()
        with report.phase("again"):
            for _ in range(AGAIN):
                self.step()

    def _evaluate(self, batch: Any, report: RankReport) -> None:
        """A step of a user's may not be made for evaluation: that is no matter of memory."""
        report.tell(parts={**report.facts["parts"], "inputs": bytes_in(batch)})
        try:
            self.evaluate(batch)
        except Exception as error:
            if failure_kind(error) != "error":
                raise
            said = (str(error).strip() or repr(error)).splitlines()[0]
            report.tell(note=f"evaluation was not tried: {said}")

    def _train_smaller(self) -> None:
        part = max(_LEAST_PART, self.size * _PART[0] // _PART[1])
        if part < self.size and (batch := beginning(self.batch(), self.size, part)) is not None:
            self.train(batch)


def beginning(batch: Any, size: int, part: int) -> Any | None:
    """The first samples of a batch; None where it is not plain to see what a sample is."""
    found = tensors_in(batch)
    if not found or any(t is None or t.dim() == 0 or t.shape[0] != size for t in found):
        return None
    return map_tensors(batch, lambda tensor: _rows(tensor, part))


def _rows(tensor: torch.Tensor, part: int) -> torch.Tensor:
    """A copy: the rest of the batch shall go."""
    return tensor[:part].clone()


def parts_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of what stays from one step to the next, and of the gradients that come in each."""
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    kept = (value for state in states for value in state.values())
    return {
        "weights": sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
        "gradients": sum(p.nbytes for p in module.parameters() if p.requires_grad),
        "optimizer": sum(value.nbytes for value in kept if isinstance(value, torch.Tensor)),
    }
