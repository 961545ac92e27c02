"""How others find a batch: Lightning's two modes, Accelerate, and doubling by hand.

    python -m max_batch.rivals lightning_binsearch resnet50 --cap BYTES

Each call is a fresh process that trains the same model in the same numbers under the same limit as
`stepscope fit`, and prints what it found as JSON. The benchmark times it from start to end.
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
from max_batch.children import Limit, Subject, build, is_memory_error, mapped, sgd, use_numbers

STEPS = 3
IMAGENET = 1_281_167
SHARE_OF_EPOCH = 0.005
"""How long each level trains when a batch is looked for by hand (claim P11)."""
ENDLESS = 1 << 20
"""Samples of a data set that is larger than any batch."""

Told = dict[str, Any]


class Prepared(Dataset[Any]):
    """The same few samples again and again: reading them costs nothing."""

    def __init__(self, subject: Subject, count: int = ENDLESS) -> None:
        inputs, labels = subject.few
        self._samples = [(inputs[place].clone(), labels[place]) for place in range(len(inputs))]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def lightning(subject: Subject, limit: Limit, mode: str) -> Told:
    """The tuner as its documentation shows it, with a module around the same model."""
    pl: Any = importlib.import_module("lightning.pytorch")
    tuner: Any = importlib.import_module("lightning.pytorch.tuner")
    scaling: Any = importlib.import_module("lightning.pytorch.tuner.batch_size_scaling")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ooms, tries = [], []
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
                tries.append(len(batch[1]))
            limit.refuse(len(batch[1]))
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
        options: Told = {"mode": mode, "steps_per_trial": STEPS, "max_trials": 25, "init_val": 2}
        if "max_val" in inspect.signature(finder.scale_batch_size).parameters:
            options["max_val"] = ENDLESS // 2  # else newer ones stop at 8192
        found = finder.scale_batch_size(Module(), **options)
    return {"batch": int(found), "ooms": sum(ooms), "tries": tries}


def accelerate(subject: Subject, limit: Limit, start: int) -> Told:
    """The decorator as its documentation shows it: all that takes memory is made inside."""
    utils: Any = importlib.import_module("accelerate.utils")
    tries: list[int] = []

    def inner(batch_size: int) -> int:
        tries.append(batch_size)
        fresh = dataclasses.replace(subject, model=copy.deepcopy(subject.model))
        train(fresh, limit, DataLoader(Prepared(subject, STEPS * batch_size), batch_size))
        return batch_size

    found = utils.find_executable_batch_size(inner, starting_batch_size=start)()
    return {"batch": int(found), "ooms": len(tries) - 1, "tries": tries}


def level(subject: Subject, limit: Limit, batch: int, workers: int) -> Told:
    """One level of doubling by hand: a short part of an epoch of ImageNet."""
    steps = -(-round(IMAGENET * SHARE_OF_EPOCH) // batch)
    loader = DataLoader(
        Prepared(subject, steps * batch),
        batch,
        num_workers=workers,
        pin_memory=limit.device == "cuda",
    )
    began = time.monotonic()
    try:
        train(subject, limit, loader)
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        return {"batch": batch, "passed": False, "training_seconds": time.monotonic() - began}
    told = {"batch": batch, "passed": True, "steps": steps}
    return {**told, "training_seconds": time.monotonic() - began}


def train(subject: Subject, limit: Limit, loader: DataLoader[Any]) -> None:
    """A plain loop over all of a loader."""
    model = subject.model.to(limit.device).train()
    optimizer = sgd(model.parameters())
    for batch in loader:
        on_device = mapped(lambda tensor: tensor.to(limit.device, non_blocking=True), batch)
        limit.refuse(len(on_device[1]))
        loss = subject.loss(model, on_device)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if limit.device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rival")
    parser.add_argument("model")
    parser.add_argument("--cap", type=int, required=True, help="bytes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most", type=int, default=None, help="the limit of a dry run, in samples")
    parser.add_argument("--start", type=int, default=0, help="of Accelerate; the batch of a level")
    parser.add_argument("--workers", type=int, default=16, help="of a level")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    subject = build(Case(options.model, 0, "tf32", "papers"))
    use_numbers(subject.precision)
    limit = Limit(options.device, options.cap, options.most)
    limit.impose()
    if options.rival.startswith("lightning_"):
        told = lightning(subject, limit, options.rival.removeprefix("lightning_"))
    elif options.rival == "accelerate":
        told = accelerate(subject, limit, options.start)
    else:
        told = level(subject, limit, options.start, options.workers)
    if options.device == "cuda":
        told["retries"] = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    print("\n" + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
