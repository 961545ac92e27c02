"""Baselines: the two modes of Lightning, Accelerate, and manual doubling.

    python -m max_batch.baselines lightning_binsearch resnet50 --cap BYTES

Each call is a fresh process that trains the same model with the same precision and memory limit as
`stepscope fit`, and prints its result as JSON. The benchmark measures its duration.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import inspect
import json
import logging
import tempfile
import time
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from max_batch.cases import Case
from max_batch.children import Limit, Subject, build, is_memory_error, mapped, set_precision, sgd

STEPS = 3
IMAGENET = 1_281_167
SHARE_OF_EPOCH = 0.005
"""Share of an epoch that each level of manual doubling trains."""
ENDLESS = 1 << 20
"""Size of a dataset that is larger than any batch."""

Record = dict[str, Any]


class Prepared(Dataset[Any]):
    """A few samples, repeated: reading them costs nothing."""

    def __init__(self, subject: Subject, count: int = ENDLESS) -> None:
        inputs, labels = subject.samples
        self._samples = [(inputs[i].clone(), labels[i]) for i in range(len(inputs))]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def lightning(subject: Subject, limit: Limit, mode: str) -> Record:
    """Run the tuner as in its documentation, with a module around the same model."""
    pl: Any = importlib.import_module("lightning.pytorch")
    tuner: Any = importlib.import_module("lightning.pytorch.tuner")
    scaling: Any = importlib.import_module("lightning.pytorch.tuner.batch_size_scaling")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ooms, tried = [], []
    is_oom = scaling.is_oom_error

    def counted(error: BaseException) -> bool:
        found: bool = is_oom(error)
        ooms.append(found)
        return found

    scaling.is_oom_error = counted

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = subject.model, 2

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == 0:
                tried.append(len(batch[1]))
            limit.check(len(batch[1]))
            return subject.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

        def train_dataloader(self) -> Any:
            return DataLoader(Prepared(subject), self.batch_size)

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu" if limit.device == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        finder = tuner.Tuner(trainer)
        options: Record = {"mode": mode, "steps_per_trial": STEPS, "max_trials": 25, "init_val": 2}
        if "max_val" in inspect.signature(finder.scale_batch_size).parameters:
            options["max_val"] = ENDLESS // 2  # newer versions stop at 8192 by default
        found = finder.scale_batch_size(Module(), **options)
    return {"batch": int(found), "ooms": sum(ooms), "tried": tried}


def accelerate(subject: Subject, limit: Limit, start: int) -> Record:
    """Run the decorator as in its documentation: everything is allocated inside."""
    utils: Any = importlib.import_module("accelerate.utils")
    tried: list[int] = []

    def inner(batch_size: int) -> int:
        tried.append(batch_size)
        fresh = dataclasses.replace(subject, model=copy.deepcopy(subject.model))
        train(fresh, limit, DataLoader(Prepared(subject, STEPS * batch_size), batch_size))
        return batch_size

    found = utils.find_executable_batch_size(inner, starting_batch_size=start)()
    return {"batch": int(found), "ooms": len(tried) - 1, "tried": tried}


def level(subject: Subject, limit: Limit, batch: int, workers: int) -> Record:
    """Run one level of manual doubling: a small part of an ImageNet epoch."""
    steps = -(-round(IMAGENET * SHARE_OF_EPOCH) // batch)
    loader = DataLoader(
        Prepared(subject, steps * batch),
        batch,
        num_workers=workers,
        pin_memory=limit.device == "cuda",
    )
    started = time.monotonic()
    try:
        train(subject, limit, loader)
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        return {"batch": batch, "passed": False, "training_seconds": time.monotonic() - started}
    result = {"batch": batch, "passed": True, "steps": steps}
    return {**result, "training_seconds": time.monotonic() - started}


def train(subject: Subject, limit: Limit, loader: DataLoader[Any]) -> None:
    """Train one pass over a loader."""
    model = subject.model.to(limit.device).train()
    optimizer = sgd(model.parameters())
    for batch in loader:
        on_device = mapped(lambda tensor: tensor.to(limit.device, non_blocking=True), batch)
        limit.check(len(on_device[1]))
        loss = subject.loss(model, on_device)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if limit.device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method")
    parser.add_argument("model")
    parser.add_argument("--cap", type=int, required=True, help="memory limit in bytes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-batch", type=int, default=None, help="batch size limit of a dry run")
    parser.add_argument(
        "--start", type=int, default=0, help="start of Accelerate, or batch of a level"
    )
    parser.add_argument("--workers", type=int, default=16, help="loader workers of a level")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    subject = build(Case(options.model, 0, "tf32", "papers"))
    set_precision(subject.precision)
    limit = Limit(options.device, options.cap, options.max_batch)
    limit.apply()
    if options.method.startswith("lightning_"):
        result = lightning(subject, limit, options.method.removeprefix("lightning_"))
    elif options.method == "accelerate":
        result = accelerate(subject, limit, options.start)
    else:
        result = level(subject, limit, options.start, options.workers)
    if options.device == "cuda":
        result["retries"] = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
