"""Checks what the function of a custom workload returned, and builds the training from it.

    model        a torch.nn.Module
    data         a Dataset, a DataLoader, or any object with a length and items
    loss         loss(output, target), for batches (x, y)
    step         step(model, batch), for all other batches; returns the loss
    optimizer    a function of the parameters, or an optimizer; default: from the settings
    collate      makes a batch from samples; default: PyTorch's

Without loss and step, the training_step of a LightningModule is used. Any other model is called
like those of transformers: `model(**batch).loss`.
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

from stepscope.errors import WorkloadError
from stepscope.workloads.custom import CustomWorkload, note_batch, skeleton
from stepscope.workloads.frameworks.contract import failure_kind
from stepscope.workloads.frameworks.torch.adapter import TorchFramework
from stepscope.workloads.frameworks.torch.data import choose_part
from stepscope.workloads.frameworks.torch.models import Built, CustomParts, LossOf
from stepscope.workloads.spec import Workload, nearest

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Collate = Callable[[list[Any]], Any]

KEYS = ("model", "data", "loss", "step", "optimizer", "collate")
_TUPLES = {2: ("model", "data"), 3: ("model", "loss", "data")}
_LOSS_HINT = "Return a tensor with one element, or a dict or an object with such a `loss`"
_OPTIMIZER_EXAMPLE = "For example: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"


class _InvalidReturn(Exception):
    """The predicate of an error message that starts with the name of the function."""

    def __init__(self, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.hint = hint
        """None: the hint is a valid function."""


def _wrong_type(key: str, value: Any, expected: str, hint: str | None = "") -> _InvalidReturn:
    if isinstance(value, type):
        hint = f"Create an instance: {value.__name__}()"
    return _InvalidReturn(f"returned {_kind(value)} as {key!r}, expected {expected}", hint)


def built_from(
    returned: Any, workload: Workload, custom: CustomWorkload, used: frozenset[str] = frozenset()
) -> Built:
    """Check the parts and build the training. `used` are the settings that the function applies."""
    try:
        parts = _parts(returned)
        model, loss, optimizer, notes = _model_and_loss(parts)
        data, collate = _data_and_collate(parts, workload)
    except _InvalidReturn as error:
        hint = error.hint
        if hint is None:
            hint = f"Expected:\n\n{skeleton(custom.file, custom.function)}"
        raise WorkloadError(f"`{custom.function}()` in {custom.shown} {error}", hint) from None
    for what, replacement in _overridden(parts["data"], workload):
        notes.append(f"{what} of the DataLoader is replaced by {replacement}")
    part = _part_of(data, workload, used)
    return Built(model, _noting_batch(loss), CustomParts(part, collate, optimizer, tuple(notes)))


def _noting_batch(loss: LossOf) -> LossOf:
    """Add the shapes of the batch to an error, which often is that a layer does not match them."""

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            return loss(model, batch)
        except Exception as error:
            if failure_kind(TorchFramework(), error) == "error" and (text := _shapes(batch)):
                note_batch(error, text)
            raise

    return loss_of


def _shapes(batch: Any) -> str:
    """`input shape (32, 3, 32, 32), target shape (32,)`; empty if the batch has no tensors."""
    values = batch if isinstance(batch, (list, tuple)) else (batch,)
    parts: dict[Any, Any] = {f"batch[{index}]": value for index, value in enumerate(values)}
    if isinstance(batch, Mapping):
        parts = dict(batch)
    elif len(values) <= 2:
        parts = dict(zip(("input", "target"), values, strict=False))
    return ", ".join(
        f"{name} shape {tuple(value.shape)}"
        for name, value in parts.items()
        if isinstance(value, torch.Tensor)
    )


def _parts(returned: Any) -> dict[str, Any]:
    if isinstance(returned, Mapping):
        parts = dict(returned)
    elif isinstance(returned, tuple) and not hasattr(returned, "_fields"):
        names = _TUPLES.get(len(returned))
        if names is None:
            raise _InvalidReturn(f"returned a tuple of {len(returned)} items, expected a dict")
        parts = dict(zip(names, returned, strict=True))
    elif not isinstance(returned, nn.Module) and hasattr(returned, "model"):
        parts = {key: getattr(returned, key, None) for key in KEYS}
    else:
        raise _InvalidReturn(f"returned {_kind(returned)}, expected a dict")
    for key in parts:
        if key not in KEYS:
            raise _InvalidReturn(f"returned an unknown key {key!r}", nearest(str(key), KEYS))
    given = {key: value for key, value in parts.items() if value is not None}
    for key in ("model", "data"):
        if key not in given:
            raise _InvalidReturn(f"did not return {key!r}")
    return given


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _model_and_loss(
    parts: dict[str, Any],
) -> tuple[nn.Module, LossOf, MakeOptimizer | None, list[str]]:
    """The model, the loss of a batch, the user's optimizer if there is one, and notes."""
    model = parts["model"]
    if not isinstance(model, nn.Module):
        raise _wrong_type("model", model, "a torch.nn.Module")
    optimizer = _optimizer_of(parts["optimizer"]) if "optimizer" in parts else None
    if "loss" in parts and "step" in parts:
        raise _InvalidReturn("returned both 'loss' and 'step'", "Return only one of them")
    if "step" in parts:
        step = _taking_two(parts, "step", "model, batch")
        return model, lambda model, batch: _scalar(step(model, batch), "`step`"), optimizer, []
    if "loss" in parts:
        return model, _loss_of_pairs(_taking_two(parts, "loss", "output, target")), optimizer, []
    if not (hasattr(model, "training_step") and hasattr(model, "configure_optimizers")):
        return model, _loss_of_labels, optimizer, []
    notes: list[str] = []
    if optimizer is None:
        optimizer, notes = _lightning_optimizer(model)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return _scalar(model(batch), "`training_step`")

    return LightningStep(model), loss, optimizer, notes


def _taking_two(parts: dict[str, Any], key: str, arguments: str) -> Callable[[Any, Any], Any]:
    function: Callable[[Any, Any], Any] = parts[key]
    if isinstance(function, type) or not callable(function):
        raise _wrong_type(key, function, f"a function of ({arguments})")
    if not _takes_two(function):
        raise _InvalidReturn(f"returned a {key!r} that does not accept ({arguments})", "")
    return function


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a function that is not written in Python
        pass
    return True


def _loss_of_pairs(loss: Callable[[Any, Any], Any]) -> LossOf:
    moved = not isinstance(loss, nn.Module)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal moved
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise WorkloadError(
                f"'loss' needs batches of the form (x, y), but a batch is {_kind(batch)}",
                "Return a 'step' instead: a function of model and batch that returns the loss",
            )
        inputs, target = batch
        output = model(inputs)
        if not moved:  # move class weights to the device of the model
            loss.to(next(model.parameters()).device)  # type: ignore[attr-defined]
            moved = True
        return _scalar(loss(output, target), "`loss`")

    return loss_of


def _loss_of_labels(model: nn.Module, batch: Any) -> torch.Tensor:
    if not isinstance(batch, Mapping):
        raise WorkloadError(
            "The workload function returned no 'loss' and no 'step', and a batch is "
            f"{_kind(batch)} instead of a dict",
            "Return a 'loss' for batches of the form (x, y), or a 'step'",
        )
    return _scalar(
        model(**batch),
        "The model",
        "Check that the batches contain labels, or return a 'step' that computes the loss",
    )


def _scalar(output: Any, source: str, hint: str = _LOSS_HINT) -> torch.Tensor:
    """The loss in an output: the output itself, its key `loss` or its attribute `loss`."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else None
    raise WorkloadError(f"{source} returned {kind or _kind(loss)} instead of a scalar loss", hint)


class LightningStep(nn.Module):
    """Calls the training_step of a LightningModule, so that torch.compile compiles it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        if not getattr(module, "automatic_optimization", True):
            raise _InvalidReturn(
                "returned a LightningModule with manual optimization",
                "Add a 'step': a function of model and batch that returns the loss",
            )
        self.module = module
        self._more = (0,) if _takes_two(module.training_step) else ()
        warnings.filterwarnings("ignore", message=r"You are trying to `self\.log")

    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, *self._more)

    def to(self, *args: Any, **kwargs: Any) -> LightningStep:
        """Use the `to` of the module, which also sets its `device`."""
        self.module.to(*args, **kwargs)
        return self


def _optimizer_of(value: Any) -> MakeOptimizer:
    if not isinstance(value, Optimizer) and not callable(value):
        raise _wrong_type("optimizer", value, "a function of the parameters", _OPTIMIZER_EXAMPLE)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = value if isinstance(value, Optimizer) else value(parameters)
        if not isinstance(optimizer, Optimizer):
            message = f"`optimizer` returned {_kind(optimizer)} instead of a torch.optim.Optimizer"
            raise WorkloadError(message, _OPTIMIZER_EXAMPLE)
        return optimizer

    return make


def _lightning_optimizer(module: Any) -> tuple[MakeOptimizer | None, list[str]]:
    def optimizers_in(configured: Any) -> list[Optimizer]:
        """The optimizers, without schedulers, in any of the forms that Lightning allows."""
        if isinstance(configured, Optimizer):
            return [configured]
        if isinstance(configured, Mapping):
            return optimizers_in(configured.get("optimizer"))
        if isinstance(configured, (list, tuple)):
            return [optimizer for part in configured for optimizer in optimizers_in(part)]
        return []

    try:
        count = len(optimizers_in(module.configure_optimizers()))
    except Exception as error:
        return None, [f"configure_optimizers needs a Trainer ({error}): `--optimizer` is used"]
    if count == 0:
        return None, ["configure_optimizers returns no optimizer: `--optimizer` is used"]
    several = f"configure_optimizers returns {count} optimizers: only the first is used"
    return lambda _: optimizers_in(module.configure_optimizers())[0], [several] if count > 1 else []


def _data_and_collate(
    parts: dict[str, Any], workload: Workload
) -> tuple[Dataset[Any], Collate | None]:
    data, collate = parts["data"], parts.get("collate")
    if collate is not None and not callable(collate):
        raise _wrong_type("collate", collate, "a function of a list of samples")
    if isinstance(data, DataLoader):
        if data.batch_size is None and data.batch_sampler is None:
            raise _InvalidReturn(
                "returned a DataLoader without batching (batch_size=None)",
                "Pass a batch_size to the DataLoader",
            )
        if collate is None and data.collate_fn is not torch_data.default_collate:
            collate = data.collate_fn
        data = data.dataset
    if isinstance(data, Mapping):
        raise _wrong_type("data", data, "a Dataset", "Return one of its values")
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, (str, bytes, type)) or not (isinstance(data, IterableDataset) or has_items):
        raise _wrong_type("data", data, "a Dataset", None)
    try:
        length = len(data)
    except (TypeError, NotImplementedError):
        length = None
    if length == 0:
        raise _InvalidReturn("returned 'data' without samples", "")
    if workload.epochs is not None and length is None:
        raise WorkloadError(
            "`--epochs` needs data with a length",
            "Use --steps or --seconds, or add a __len__ to the dataset",
        )
    return data, collate


def _overridden(loader: Any, workload: Workload) -> Iterator[tuple[str, str]]:
    """Properties of the user's DataLoader that the loader of the training does not keep."""
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
        yield "shuffle=False", "shuffling with --seed"
    elif not isinstance(loader.sampler, torch_data.RandomSampler):
        yield type(loader.sampler).__name__, "shuffling with --seed"
    if not loader.drop_last:
        yield "drop_last=False", "drop_last=True"


def _part_of(data: Dataset[Any], workload: Workload, used: frozenset[str]) -> Dataset[Any]:
    """The part of the data that `samples` and `fraction` select, unless the function uses them."""
    samples = workload.samples if "samples" not in used else None
    fraction = workload.fraction if "fraction" not in used else 1.0
    if samples is None and fraction == 1.0:
        return data
    if isinstance(data, IterableDataset) or not isinstance(data, Sized):
        raise WorkloadError(
            "`--samples` and `--fraction` need a dataset with __len__ and __getitem__",
            "Remove them, or add them as parameters of your function",
        )
    if samples is not None and samples > len(data):
        raise WorkloadError(
            f"`--samples {samples}` is more than the data has ({len(data)})",
            f"Use at most {len(data)}, or add `samples` as a parameter of your function",
        )
    part = replace(workload, fraction=fraction)
    return torch_data.Subset(data, choose_part(len(data), samples or len(data), part))
