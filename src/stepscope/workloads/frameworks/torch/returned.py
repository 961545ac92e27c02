"""What a user's function returned, made into the parts of a training.

    model        a torch.nn.Module
    data         a Dataset, a DataLoader of one, or anything with a length and items
    loss         loss(output, target), for batches (x, y)
    step         step(model, batch), for all others; gives the loss
    optimizer    a function of the parameters, or an optimizer; default: that of the settings
    collate      makes a batch of samples; default: PyTorch's

With neither loss nor step, a LightningModule has its training_step, and any other model is called
as those of transformers are: `model(**batch).loss`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stepscope.errors import BadWorkload
from stepscope.workloads.frameworks.torch.data import choose_part
from stepscope.workloads.frameworks.torch.models import Built, LossOf, Own
from stepscope.workloads.own import OwnPlace, skeleton
from stepscope.workloads.spec import Workload, nearest, option_name

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Collate = Callable[[list[Any]], Any]

KEYS = ("model", "data", "loss", "step", "optimizer", "collate")
_TUPLES = {2: ("model", "data"), 3: ("model", "loss", "data")}
_OPTIMIZER_EXAMPLE = "For example: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"


class _Wrong(Exception):
    """What is wrong with it, to follow the words `workload()`."""

    def __init__(self, said: str, hint: str | None = None) -> None:
        super().__init__(said)
        self.hint = hint
        """None: a function that is right is shown."""


def _not(key: str, value: Any, wanted: str, hint: str | None = "") -> _Wrong:
    return _Wrong(f"returned as {key!r} {_a(value)}, not {wanted}", hint)


def built_from(
    returned: Any, workload: Workload, place: OwnPlace, used: frozenset[str] = frozenset()
) -> Built:
    """The parts, checked. `used` are the settings that the function named, and sees to itself."""
    try:
        parts = _parts(returned)
        model, loss, optimizer, notes = _trained(parts)
        data, collate = _data_and_collate(parts, workload)
    except _Wrong as wrong:
        hint = wrong.hint
        if hint is None:
            hint = f"What it shall return:\n\n{skeleton(place.file, place.function)}"
        raise BadWorkload(f"{place.function}() of {place.shown} {wrong}", hint) from None
    for what, to in _overridden(parts["data"], workload):
        notes.append(f"the DataLoader's {what} gave way to {to}")
    part = _part_of(data, workload, used)
    return Built(model, loss, Own(part, collate, optimizer, tuple(notes)))


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


def _trained(
    parts: dict[str, Any],
) -> tuple[nn.Module, LossOf, MakeOptimizer | None, list[str]]:
    """The model, what makes a loss of a batch, the optimizer if it is the user's, and notes."""
    model = parts["model"]
    if not isinstance(model, nn.Module):
        raise _not("model", model, "a torch.nn.Module")
    optimizer = _optimizer_of(parts["optimizer"]) if "optimizer" in parts else None
    if "loss" in parts and "step" in parts:
        raise _Wrong("returned both 'loss' and 'step': one of them is enough", "")
    if "step" in parts:
        step = _taking_two(parts, "step", "model, batch")
        return model, lambda model, batch: _scalar(step(model, batch), "The step"), optimizer, []
    if "loss" in parts:
        return model, _loss_of_pairs(_taking_two(parts, "loss", "output, target")), optimizer, []
    if not (hasattr(model, "training_step") and hasattr(model, "configure_optimizers")):
        return model, _loss_of_labels, optimizer, []
    notes: list[str] = []
    if optimizer is None:
        optimizer, notes = _lightning_optimizer(model)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return _scalar(model(batch), "The training_step")

    return LightningStep(model), loss, optimizer, notes


def _taking_two(parts: dict[str, Any], key: str, arguments: str) -> Callable[[Any, Any], Any]:
    function: Callable[[Any, Any], Any] = parts[key]
    if isinstance(function, type) or not callable(function):
        raise _not(key, function, f"a function of ({arguments})")
    if not _takes_two(function):
        raise _Wrong(f"returned a {key!r} that does not take ({arguments})", "")
    return function


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # one that is not written in Python
        pass
    return True


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
        self._more = (0,) if _takes_two(module.training_step) else ()
        warnings.filterwarnings("ignore", message=r"You are trying to `self\.log")

    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, *self._more)

    def to(self, *args: Any, **kwargs: Any) -> LightningStep:
        """By the module's own `to`: only that tells it its device."""
        self.module.to(*args, **kwargs)
        return self


def _optimizer_of(given: Any) -> MakeOptimizer:
    if not isinstance(given, Optimizer) and not callable(given):
        raise _not("optimizer", given, "a function of the parameters", _OPTIMIZER_EXAMPLE)

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = given if isinstance(given, Optimizer) else given(parameters)
        if not isinstance(made, Optimizer):
            said = f"The 'optimizer' gave {_a(made)}, not a torch.optim.Optimizer"
            raise BadWorkload(said, _OPTIMIZER_EXAMPLE)
        return made

    return optimizer


def _lightning_optimizer(module: Any) -> tuple[MakeOptimizer | None, list[str]]:

    def found_in(configured: Any) -> list[Optimizer]:
        """All that are in one of the forms that Lightning allows; schedulers are left out."""
        if isinstance(configured, Optimizer):
            return [configured]
        if isinstance(configured, Mapping):
            return found_in(configured.get("optimizer"))
        if isinstance(configured, (list, tuple)):
            return [optimizer for part in configured for optimizer in found_in(part)]
        return []

    try:
        count = len(found_in(module.configure_optimizers()))
    except Exception as error:
        return None, [f"configure_optimizers needs a Trainer ({error}): --optimizer is used"]
    if count == 0:
        return None, ["configure_optimizers gives no optimizer: --optimizer is used"]
    several = f"of the {count} optimizers that configure_optimizers gives, the first is used"
    return lambda _: found_in(module.configure_optimizers())[0], [several] if count > 1 else []


def _data_and_collate(
    parts: dict[str, Any], workload: Workload
) -> tuple[Dataset[Any], Collate | None]:
    data, collate = parts["data"], parts.get("collate")
    if collate is not None and not callable(collate):
        raise _not("collate", collate, "a function of a list of samples")
    if isinstance(data, DataLoader):
        if data.batch_size is None and data.batch_sampler is None:
            said = "returned a DataLoader that makes no batches (batch_size=None)"
            raise _Wrong(said, "Give it a batch_size")
        if collate is None and data.collate_fn is not torch_data.default_collate:
            collate = data.collate_fn
        data = data.dataset
    if isinstance(data, Mapping):
        raise _not("data", data, "a Dataset", "Return one of those in it")
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, (str, bytes, type)) or not (isinstance(data, IterableDataset) or has_items):
        raise _not("data", data, "a Dataset", None)
    try:
        length = len(data)
    except (TypeError, NotImplementedError):
        length = None
    if length == 0:
        raise _Wrong("returned 'data' without a sample", "")
    if workload.epochs is not None and length is None:
        raise BadWorkload(
            "The data has no length, so there is no telling when an epoch ends",
            "Give --steps or --seconds, or the data set a __len__",
        )
    return data, collate


def _overridden(loader: Any, workload: Workload) -> Iterator[tuple[str, str]]:
    """What a DataLoader has otherwise than the loader that is made of its data set."""
    if not isinstance(loader, DataLoader):
        return
    if loader.batch_size is not None and loader.batch_size != workload.batch_size:
        yield f"batch_size {loader.batch_size}", f"--batch-size {workload.batch_size}"
    if loader.num_workers != workload.workers:
        yield f"num_workers {loader.num_workers}", f"--workers {workload.workers}"
    if isinstance(loader.dataset, IterableDataset):
        return
    if loader.batch_size is None:
        yield "batch_sampler", f"shuffled batches of --batch-size {workload.batch_size}"
        return
    if isinstance(loader.sampler, torch_data.SequentialSampler):
        yield "shuffle=False", "a shuffle that --seed fixes"
    elif not isinstance(loader.sampler, torch_data.RandomSampler):
        yield type(loader.sampler).__name__, "a shuffle that --seed fixes"
    if not loader.drop_last:
        yield "drop_last=False", "whole batches only"


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
    part = replace(workload, fraction=fraction)
    return torch_data.Subset(data, choose_part(len(data), asked or len(data), part))
