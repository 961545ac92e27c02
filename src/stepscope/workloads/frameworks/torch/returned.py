"""What a user's function returned, made into the parts of a training.

    model        a torch.nn.Module
    data         a Dataset, a DataLoader of one, or anything with a length and items
    loss         loss(output, target), for batches (x, y)
    step         step(model, batch), for all others; gives the loss
    optimizer    a function of the parameters, or an optimizer; unsaid: that of the knobs
    collate      makes a batch of samples; unsaid: PyTorch's

With neither loss nor step, a LightningModule has its training_step, and any other model is called
as those of transformers are: `model(**batch).loss`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from stepscope.errors import BadWorkload
from stepscope.workloads.frameworks.torch.parts import Built, LossOf, Own
from stepscope.workloads.own import OwnPlace, skeleton
from stepscope.workloads.spec import Workload, nearest, option_name

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

KEYS = ("model", "data", "loss", "step", "optimizer", "collate")
_OPTIMIZER_EXAMPLE = "For example: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
_TUPLES = {2: ("model", "data"), 3: ("model", "loss", "data")}


class _Wrong(Exception):
    """What is wrong with it, to follow the words `workload()`."""

    def __init__(self, said: str, hint: str | None = None) -> None:
        super().__init__(said)
        self.hint = hint
        """Nothing: then a function that is right is shown."""


def built_from(
    returned: Any, workload: Workload, place: OwnPlace, used: frozenset[str] = frozenset()
) -> Built:
    """The parts, checked. `used` are the knobs that the function named, and sees to itself."""
    try:
        parts = _parts(returned)
        notes = (*_notes_on_optimizer(parts), *_notes_on_loader(parts["data"], workload))
        model, loss, optimizer = _trained(parts)
        data, collate = _fed(parts, workload)
    except _Wrong as wrong:
        hint = wrong.hint
        if hint is None:
            hint = f"What it shall return:\n\n{skeleton(place.file, place.function)}"
        raise BadWorkload(f"{place.function}() of {place.shown} {wrong}", hint) from None
    return Built(model, loss, Own(_part_of(data, workload, used), collate, optimizer, notes))


def _parts(returned: Any) -> dict[str, Any]:
    if isinstance(returned, Mapping):
        parts = dict(returned)
    elif isinstance(returned, tuple) and not hasattr(returned, "_fields"):
        names = _TUPLES.get(len(returned))
        if names is None:
            raise _Wrong(f"returned a tuple of {len(returned)}, not a dict")
        parts = dict(zip(names, returned, strict=True))
    elif not isinstance(returned, nn.Module) and hasattr(returned, "model"):
        parts = {key: getattr(returned, key, None) for key in KEYS}
    else:
        raise _Wrong(f"returned {_a(returned)}, not a dict")
    for key in parts:
        if key not in KEYS:
            raise _Wrong(f"returned {key!r}, which means nothing", nearest(str(key), KEYS))
    given = {key: value for key, value in parts.items() if value is not None}
    for key in ("model", "data"):
        if key not in given:
            raise _Wrong(f"returned no {key!r}")
    return given


def _a(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, which is still to be called"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _trained(parts: dict[str, Any]) -> tuple[nn.Module, LossOf, MakeOptimizer | None]:
    """The model, what makes a loss of a batch, and the optimizer if it is not that of the knobs."""
    model = parts["model"]
    if not isinstance(model, nn.Module):
        raise _Wrong(f"returned as 'model' {_a(model)}, not a torch.nn.Module", "")
    optimizer = _optimizer_of(parts["optimizer"]) if "optimizer" in parts else None
    if "loss" in parts and "step" in parts:
        raise _Wrong("returned both 'loss' and 'step': one of them is enough", "")
    if "step" in parts:
        return model, _loss_of_step(_taking_two(parts, "step", "model, batch")), optimizer
    if "loss" in parts:
        return model, _loss_of_pairs(_taking_two(parts, "loss", "output, target")), optimizer
    if _is_lightning(model):
        optimizer = optimizer or _lightning_optimizer(model)
        return LightningStep(model), _loss_of_lightning, optimizer
    return model, _loss_of_labels, optimizer


def _taking_two(parts: dict[str, Any], key: str, arguments: str) -> Callable[[Any, Any], Any]:
    function = parts[key]
    if isinstance(function, type) or not callable(function):
        raise _Wrong(f"returned as {key!r} {_a(function)}, not a function of ({arguments})", "")
    if not _takes(function, 2):
        raise _Wrong(f"returned a {key!r} that does not take ({arguments})", "")
    taking: Callable[[Any, Any], Any] = function
    return taking


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # one that is not written in Python
        return True
    return True


def _loss_of_step(step: Callable[[Any, Any], Any]) -> LossOf:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return _scalar(step(model, batch), "The step")

    return loss_of


def _loss_of_pairs(loss: Callable[[Any, Any], Any]) -> LossOf:
    moved = not isinstance(loss, nn.Module)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal moved
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise BadWorkload(
                f"A batch is {_a(batch)}, and 'loss' is for pairs (x, y)",
                "Return a 'step' instead: a function of model and batch that gives the loss",
            )
        inputs, target = batch
        output = model(inputs)
        if not moved:  # its class weights go where the model went
            loss.to(next(model.parameters()).device)  # type: ignore[attr-defined]
            moved = True
        return _scalar(loss(output, target), "The loss")

    return loss_of


def _loss_of_lightning(model: nn.Module, batch: Any) -> torch.Tensor:
    return _scalar(model(batch), "The training_step")


def _loss_of_labels(model: nn.Module, batch: Any) -> torch.Tensor:
    if not isinstance(batch, Mapping):
        raise BadWorkload(
            f"A batch is {_a(batch)}, and nothing tells how to make a loss of it",
            "Return a 'loss' for batches (x, y), or a 'step'",
        )
    return _scalar(model(**batch), "The model, which got no labels or has no loss,")


def _scalar(given: Any, giver: str) -> torch.Tensor:
    """The loss in what was given: itself, under the key `loss`, or as an attribute."""
    loss = given.get("loss") if isinstance(given, Mapping) else getattr(given, "loss", given)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else _a(loss)
    raise BadWorkload(
        f"{giver} gave {what}, not a loss",
        "It shall give a tensor with one number, or a dict or an object with such a `loss`",
    )


class LightningStep(nn.Module):
    """A LightningModule that is called by its training_step, so that compiling it compiles that."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        if not getattr(module, "automatic_optimization", True):
            raise _Wrong(
                "returned a LightningModule that steps its own optimizers",
                "Add a 'step': a function of model and batch that gives the loss",
            )
        self.module = module
        self._more = (0,) if _takes(module.training_step, 2) else ()
        warnings.filterwarnings("ignore", message=r"You are trying to `self\.log")

    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, *self._more)

    def to(self, *args: Any, **kwargs: Any) -> LightningStep:
        """By the module's own `to`: only that tells it its device."""
        self.module.to(*args, **kwargs)
        return self


def _optimizer_of(given: Any) -> MakeOptimizer:
    if not isinstance(given, Optimizer) and not callable(given):
        raise _Wrong(
            f"returned as 'optimizer' {_a(given)}, not a function of the parameters",
            _OPTIMIZER_EXAMPLE,
        )

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = given if isinstance(given, Optimizer) else given(parameters)
        if not isinstance(made, Optimizer):
            raise BadWorkload(
                f"The 'optimizer' gave {_a(made)}, not a torch.optim.Optimizer",
                _OPTIMIZER_EXAMPLE,
            )
        return made

    return optimizer


def _lightning_optimizer(module: Any) -> MakeOptimizer | None:
    """That of configure_optimizers, where it works without a Trainer."""
    try:
        found = _optimizers_in(module.configure_optimizers())
    except Exception:
        return None
    return (lambda _: _optimizers_in(module.configure_optimizers())[0]) if found else None


def _notes_on_optimizer(parts: dict[str, Any]) -> Iterator[str]:
    module = parts["model"]
    if not _is_lightning(module) or parts.keys() & {"loss", "step", "optimizer"}:
        return
    try:
        count = len(_optimizers_in(module.configure_optimizers()))
    except Exception as error:
        yield f"configure_optimizers needs a Trainer ({error}): --optimizer is used"
        return
    if count == 0:
        yield "configure_optimizers gives no optimizer: --optimizer is used"
    if count > 1:
        yield f"of the {count} optimizers that configure_optimizers gives, the first is used"


def _is_lightning(model: Any) -> bool:
    return hasattr(model, "training_step") and hasattr(model, "configure_optimizers")


def _optimizers_in(configured: Any) -> list[Optimizer]:
    """All that are in one of the forms that Lightning allows; schedulers are left out."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return _optimizers_in(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        return [found for part in configured for found in _optimizers_in(part)]
    return []


def _fed(
    parts: dict[str, Any], workload: Workload
) -> tuple[Dataset[Any], Callable[[list[Any]], Any] | None]:
    """The data set and what makes batches of it."""
    data, collate = parts["data"], parts.get("collate")
    if collate is not None and not callable(collate):
        raise _Wrong(
            f"returned as 'collate' {_a(collate)}, not a function of a list of samples", ""
        )
    if isinstance(data, DataLoader):
        collate = collate or _collate_of(data)
        data = data.dataset
    if isinstance(data, Mapping):
        raise _Wrong(f"returned as 'data' {_a(data)}, not a Dataset", "Return one of those in it")
    if isinstance(data, (str, bytes, type)) or not _has_samples(data):
        raise _Wrong(f"returned as 'data' {_a(data)}, not a Dataset")
    if _length(data) == 0:
        raise _Wrong("returned 'data' without a sample", "")
    if workload.epochs is not None and _length(data) is None:
        raise BadWorkload(
            "The data has no length, so there is no telling when an epoch ends",
            "Give --steps or --seconds, or the data set a __len__",
        )
    dataset: Dataset[Any] = data
    return dataset, collate


def _collate_of(loader: DataLoader[Any]) -> Callable[[list[Any]], Any] | None:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise _Wrong(
            "returned a DataLoader that makes no batches (batch_size=None)", "Give it a batch_size"
        )
    return None if loader.collate_fn is default_collate else loader.collate_fn


def _notes_on_loader(loader: Any, workload: Workload) -> Iterator[str]:
    """What a DataLoader has otherwise than the loader that is made of its data set."""
    if not isinstance(loader, DataLoader):
        return
    if loader.batch_size is not None and loader.batch_size != workload.batch_size:
        yield _gave_way(f"batch_size {loader.batch_size}", f"--batch-size {workload.batch_size}")
    if loader.num_workers != workload.workers:
        yield _gave_way(f"num_workers {loader.num_workers}", f"--workers {workload.workers}")
    if isinstance(loader.dataset, IterableDataset):
        return
    if loader.batch_size is None:
        yield _gave_way("batch_sampler", f"shuffled batches of --batch-size {workload.batch_size}")
        return
    if isinstance(loader.sampler, SequentialSampler):
        yield _gave_way("shuffle=False", "a shuffle that --seed fixes")
    elif not isinstance(loader.sampler, RandomSampler):
        yield _gave_way(type(loader.sampler).__name__, "a shuffle that --seed fixes")
    if not loader.drop_last:
        yield _gave_way("drop_last=False", "whole batches only")


def _gave_way(what: str, to: str) -> str:
    return f"the DataLoader's {what} gave way to {to}"


def _has_samples(data: Any) -> bool:
    return isinstance(data, IterableDataset) or (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    )


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _part_of(data: Dataset[Any], workload: Workload, used: frozenset[str]) -> Dataset[Any]:
    """As much of the data as `samples` and `fraction` say, where the function left that to us."""
    asked = workload.samples if "samples" not in used else None
    fraction = workload.fraction if "fraction" not in used else 1.0
    if asked is None and fraction == 1.0:
        return data
    if isinstance(data, IterableDataset) or not isinstance(data, Sized):
        raise BadWorkload(
            "Data that is only iterated over has no part",
            "Leave --samples and --fraction out, or let the function take them",
        )
    if asked is not None and asked > len(data):
        raise BadWorkload(
            f"{option_name('samples')} {asked} is more than the data has: {len(data)}",
            "Give fewer, or let the function take `samples`",
        )
    kept = max(1, round((asked or len(data)) * fraction))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(workload.seed))
    return Subset(data, order[:kept].tolist())
