"""The training loop of a trial: builds, steps, measures; the same for every model and data set."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, Subset

from stepscope.errors import BadWorkload
from stepscope.runs.paths import replace_atomically
from stepscope.steplog import StepLog
from stepscope.workloads.frameworks.torch import ranks
from stepscope.workloads.frameworks.torch.clock import (
    DeviceClock,
    HostClock,
    NoClock,
    StepClock,
    running,
)
from stepscope.workloads.frameworks.torch.cycle import Cycle, HostMemory, parts_of
from stepscope.workloads.frameworks.torch.data import build_data, prepare_cache
from stepscope.workloads.frameworks.torch.device import (
    Numbers,
    cap_memory,
    choose_device,
    describe_device,
    memory_facts,
    set_numbers,
    versions,
)
from stepscope.workloads.frameworks.torch.duration import Duration
from stepscope.workloads.frameworks.torch.feed import (
    Feed,
    LoaderFeed,
    ResidentFeed,
    make_loader,
    mover,
)
from stepscope.workloads.frameworks.torch.models import build_model, parameters_of, shape_of
from stepscope.workloads.frameworks.torch.parts import Built, Data, LossOf, Shape
from stepscope.workloads.frameworks.torch.user import load_own
from stepscope.workloads.reporting import Place, RankReport
from stepscope.workloads.spec import LOADER_ONLY, RESIDENT, Workload


def train(workload: Workload, place: Place, report: RankReport) -> None:
    """One rank's training, from nothing to its last fact."""
    device = choose_device(workload, place)
    pin = _pins(workload)
    if place.threads:
        torch.set_num_threads(place.threads)
    cap_memory(device, place.gpu_memory)
    numbers = set_numbers(workload.precision, device)
    report.tell(**describe_device(device), versions=versions(), threads=torch.get_num_threads())
    torch.manual_seed(workload.seed)
    with ranks.joined(place.ranks, device):
        _train(workload, place, report, device, numbers, pin)
    report.tell(done=True)


def _pins(workload: Workload) -> bool:
    """Unsaid: where there is a GPU to copy to, also if only loading is measured."""
    if workload.pin is not None:
        return workload.pin
    return workload.device != "cpu" and torch.cuda.is_available()


def _train(
    workload: Workload,
    place: Place,
    report: RankReport,
    device: torch.device,
    numbers: Numbers,
    pin: bool,
) -> None:
    built, data, shape = _build(workload, place, report)
    move = mover(device, workload.channels_last)
    with closed_in_time(_feed(workload, place, data, pin, move), report) as feed:
        stepper = None
        if workload.part != LOADER_ONLY:
            assert built is not None
            with report.phase("build"):
                stepper = Stepper(workload, place, built, device, numbers)
        per_epoch = _steps_per_epoch(workload, feed)
        report.tell(**_plan_facts(workload, per_epoch, pin, built, shape))
        duration = _duration(workload, per_epoch, lambda n: ranks.agreed(n, place.ranks, device))
        log = StepLog(place.steps)
        clock = DeviceClock(log, device) if device.type == "cuda" else HostClock(log)
        loop = Loop(
            workload, feed, move if stepper and not workload.part else _leave, stepper, clock
        )
        memory = HostMemory()
        if place.cycle:
            loop = replace(loop, after_step=memory.note)
            memory.begin()
        steps = loop.run(duration, report)
        log.close()
        report.tell(
            steps=steps,
            samples=steps * workload.step_samples,
            last_loss=stepper.last_loss() if stepper else None,
            device_memory=memory_facts(device, place.gpu_memory) if stepper else None,
        )
        if place.profiled_steps:
            _profile(loop, place, report, device, per_epoch)
        if place.cycle:
            _go_on(loop, report)
            report.tell(host_memory=memory.facts())


@contextlib.contextmanager
def closed_in_time(feed: Feed, report: RankReport) -> Iterator[Feed]:
    """A feed whose workers end when it is done, also where the training fails."""
    try:
        yield feed
    finally:
        with report.phase("closing"):
            feed.close()


def _build(
    workload: Workload, place: Place, report: RankReport
) -> tuple[Built | None, Data, Shape | None]:
    """The model (none where only loading is measured), the data, and their shape if it is ours."""
    if workload.is_own:
        with report.phase("build"):
            built = load_own(workload)
        assert built.own is not None
        with report.phase("data"):
            data = Data(built.own.data, {"name": "own"}, collate=built.own.collate)
            report.tell(data=_own_facts(data, built.own.notes))
        shape = None
    else:
        with report.phase("data"):
            shape = shape_of(workload)
            data = build_data(workload, shape)
            cache = prepare_cache(workload, data) if place.rank == 0 else None
            ranks.wait_for_all(place.ranks)  # nobody reads what the first may still evict
            report.tell(data={**data.facts, "cache": cache})
        if workload.part == LOADER_ONLY:
            return None, data, shape
        with report.phase("build"):
            built = build_model(workload, shape)
    report.tell(model={"name": workload.model, "parameters": parameters_of(built.model)})
    return built, data, shape


def _own_facts(data: Data, notes: tuple[str, ...]) -> dict[str, Any]:
    whole = data.dataset.dataset if isinstance(data.dataset, Subset) else data.dataset
    samples, of = _length(data.dataset), _length(whole)
    facts = {**data.facts, "samples": samples, "of": of, "source": "the user's"}
    if isinstance(data.dataset, IterableDataset):
        notes = (*notes, "every worker and rank goes through all of it, unless it shards itself")
    return {**facts, "notes": list(notes)}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # an IterableDataset without an end
        return None


def _feed(
    workload: Workload, place: Place, data: Data, pin: bool, move: Callable[[Any], Any]
) -> Feed:
    if workload.part != RESIDENT:
        return LoaderFeed(make_loader(workload, place, data, pin), workload.accumulate)
    loader = make_loader(workload, place, data, pin=False)
    source = LoaderFeed(loader)
    batch = move(source.next())
    source.close()
    return ResidentFeed(batch, source.batches_per_epoch)


def _leave(batch: Any) -> Any:
    """A batch that is where it should be."""
    return batch


def _steps_per_epoch(workload: Workload, feed: Feed) -> int | None:
    return feed.batches_per_epoch // workload.accumulate if feed.batches_per_epoch else None


def _duration(workload: Workload, per_epoch: int | None, agreed: Callable[[int], int]) -> Duration:
    if workload.epochs is not None and not per_epoch:
        raise BadWorkload(
            "An epoch of this data has no end, or less than one step",
            "Give --steps or --seconds, or a smaller batch",
        )
    return Duration(workload, per_epoch, agreed)


def _plan_facts(
    workload: Workload,
    per_epoch: int | None,
    pin: bool,
    built: Built | None,
    shape: Shape | None,
) -> dict[str, Any]:
    own_optimizer = built is not None and built.own is not None and built.own.optimizer is not None
    return {
        "knobs": {
            **workload.as_dict(),
            "pin": pin,
            "prefetch": workload.prefetch if workload.workers else None,
            "persistent": workload.persistent if workload.workers else None,
            **(_resolved(shape) if shape else {}),
            **(dict.fromkeys(_OPTIMIZER_KNOBS) if own_optimizer else {}),
            "optimizer": "the user's" if own_optimizer else workload.optimizer,
        },
        "batch": {
            "per_rank": workload.batch_size,
            "accumulate": workload.accumulate,
            "ranks": workload.ranks,
            "global": workload.global_batch,
        },
        "steps_per_epoch": per_epoch,
        "samples_per_epoch": per_epoch * workload.global_batch if per_epoch else None,
    }


_OPTIMIZER_KNOBS = ("lr", "momentum", "weight_decay")


def _resolved(shape: Shape) -> dict[str, int | None]:
    """The knobs of what the model takes, as they came out."""
    return {
        "image_size": shape.size or None,
        "frames": shape.frames or None,
        "length": shape.length or None,
        "classes": shape.classes,
    }


def _profile(
    loop: Loop, place: Place, report: RankReport, device: torch.device, per_epoch: int | None
) -> None:
    from stepscope.workloads.frameworks.torch.profile import profile_steps

    untimed = replace(loop, clock=NoClock())
    with report.phase("profile"):
        try:
            found = profile_steps(
                untimed.one_step, place.profiled_steps, place.trace, str(device), per_epoch
            )
        except Exception as error:
            if place.ranks > 1:  # the others wait for a step that will not come
                raise
            found = {"error": f"A step failed under the profiler: {error}"}
        replace_atomically(place.profile, json.dumps(found, indent=1) + "\n")


def _go_on(loop: Loop, report: RankReport) -> None:
    """The rest of the cycle, and what of its memory is known by name."""
    stepper, untimed = loop.stepper, replace(loop, clock=NoClock())
    if stepper is None:
        return
    report.tell(parts=parts_of(stepper.forward, stepper.optimizer))

    def train(batch: Any) -> None:
        stepper.batch(batch, last=True)
        stepper.step()

    Cycle(
        batch=lambda: loop.move(loop.feed.next()),
        train=train,
        evaluate=stepper.evaluate,
        step=untimed.one_step,
        size=loop.workload.batch_size,
    ).run(report)


class Stepper:
    """Forward, backward and optimizer of one rank."""

    def __init__(
        self, workload: Workload, place: Place, built: Built, device: torch.device, numbers: Numbers
    ) -> None:
        self._numbers = numbers
        self._parts = workload.accumulate
        model = built.model.to(device)
        model.train()
        if workload.channels_last:
            _use_channels_last(model)
        if workload.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        self.forward = ranks.distributed(_Forward(model, built.loss), place.ranks, device)
        """From a batch to its loss."""
        parameters = [p for p in self.forward.parameters() if p.requires_grad]
        self.optimizer = (
            built.own.optimizer(parameters)
            if built.own and built.own.optimizer
            else _optimizer(workload, parameters)
        )
        self._loss: torch.Tensor | None = None

    def batch(self, batch: Any, last: bool) -> None:
        """Add the gradients of a batch; the last of a step exchanges them between ranks."""
        with contextlib.nullcontext() if last else ranks.without_sync(self.forward):
            with self._numbers.autocast():
                loss = self.forward(batch)
            self._loss = loss.detach()
            self._numbers.scaler.scale(loss / self._parts if self._parts > 1 else loss).backward()

    def step(self) -> None:
        self._numbers.scaler.step(self.optimizer)
        self._numbers.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, batch: Any) -> None:
        """The loss of a batch as a validation computes it; what is trained stays as it is."""
        self.forward.eval()
        try:
            with torch.no_grad(), self._numbers.autocast():
                self.forward(batch)
        finally:
            self.forward.train()

    def last_loss(self) -> float | None:
        """What the loss was in the end. Waits for the device: not within the measured steps."""
        return None if self._loss is None else float(self._loss.float().mean().item())


class _Forward(nn.Module):
    """Model and loss as one module, so that gradients are exchanged whatever a user's step does."""

    def __init__(self, model: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss(self.model, batch)


def _use_channels_last(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() in (4, 5):
            layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
            parameter.data = parameter.data.contiguous(memory_format=layout)


def _optimizer(workload: Workload, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    decay = workload.weight_decay
    if workload.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=workload.lr, weight_decay=decay)
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=workload.lr, weight_decay=decay)
    return torch.optim.SGD(
        parameters, lr=workload.lr, momentum=workload.momentum, weight_decay=decay
    )


@dataclass(frozen=True)
class Loop:
    """Takes steps: waits for batches, copies them, computes, with every part timed."""

    workload: Workload
    feed: Feed
    move: Callable[[Any], Any]
    stepper: Stepper | None
    clock: StepClock
    after_step: Callable[[], None] = lambda: None

    def run(self, duration: Duration, report: RankReport) -> int:
        """All steps of the trial; the first is timed apart: it builds, tunes and compiles."""
        taken = 0
        began = time.monotonic()
        report.tell(phase="first step", planned_steps=duration.total)
        with running(self.clock):
            while duration.goes_on():
                if duration.total != report.facts["planned_steps"]:
                    report.tell(planned_steps=duration.total)
                self.one_step()
                taken += 1
                if taken == 1:
                    report.took("first_step", time.monotonic() - began)
                    report.tell(phase="training")
        report.took("training", time.monotonic() - began)
        return taken

    def one_step(self) -> None:
        clock, feed, stepper = self.clock, self.feed, self.stepper
        for part in range(self.workload.accumulate, 0, -1):
            batch = feed.next()
            clock.waited()
            batch = self.move(batch)
            clock.copied()
            if stepper:
                stepper.batch(batch, last=part == 1)
            clock.computed()
        if stepper:
            stepper.step()
        clock.done()
        self.after_step()
