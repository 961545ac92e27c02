"""The training of a trial: builds, steps, measures; the same for every model and data set."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset

from stepscope.errors import BadWorkload
from stepscope.records.codec import to_json
from stepscope.runs.paths import replace_atomically
from stepscope.steplog import StepLog
from stepscope.workloads.frameworks.torch import batches, models
from stepscope.workloads.frameworks.torch import device as devices
from stepscope.workloads.frameworks.torch.adapter import TorchFramework
from stepscope.workloads.frameworks.torch.clock import DeviceClock, Duration, HostClock, StepClock
from stepscope.workloads.frameworks.torch.data import Data, build_data, prepare_cache
from stepscope.workloads.frameworks.torch.meters import HostMemory
from stepscope.workloads.frameworks.torch.stepper import Phase, Stepper, rest_of_cycle
from stepscope.workloads.frameworks.torch.user import load_own
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import LOADER_ONLY, RESIDENT, Workload

_OPTIMIZER_SETTINGS = ("lr", "momentum", "weight_decay")


def train(workload: Workload, place: RankPlacement, report: RankReport) -> None:
    device = devices.choose_device(workload, place)
    if place.threads:
        torch.set_num_threads(place.threads)
    devices.cap_memory(device, place.gpu_memory)
    precision = devices.set_precision(workload.precision, device)
    report.tell(
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        versions=devices.versions(),
        threads=torch.get_num_threads(),
    )
    torch.manual_seed(workload.seed)
    with devices.joined(place.ranks, device):
        _train(workload, report, device, precision)
    report.tell(done=True)


def _train(
    workload: Workload, report: RankReport, device: torch.device, precision: devices.Precision
) -> None:
    place = report.place
    built, data, shape = _build(workload, report)
    pin = workload.pin
    if pin is None:  # where there is a GPU to copy to, also if only loading is measured
        pin = workload.device != "cpu" and torch.cuda.is_available()
    move = batches.mover(device, workload.channels_last)
    if workload.part == RESIDENT:
        source = batches.LoaderFeed(batches.make_loader(workload, place, data, pin=False))
        feed: batches.Feed = batches.ResidentFeed(move(source.next()), source.batches_per_epoch)
        source.close()
    else:
        loader = batches.make_loader(workload, place, data, pin)
        feed = batches.LoaderFeed(loader, workload.accumulate)
    try:
        stepper = None
        if built is not None and workload.part != LOADER_ONLY:
            with report.phase("build"):
                stepper = Stepper(workload, built, device, precision)
        count = feed.batches_per_epoch
        per_epoch = count // workload.accumulate if count else None
        report.tell(**_plan_facts(workload, per_epoch, pin, built, shape))
        if workload.epochs is not None and not per_epoch:
            raise BadWorkload(
                "An epoch of this data has no end, or less than one step",
                "Give --steps or --seconds, or a smaller batch",
            )
        duration = Duration(
            workload, per_epoch, lambda number: devices.agreed(number, place.ranks, device)
        )
        log = StepLog(place.steps)
        clock = DeviceClock(log, device) if device.type == "cuda" else HostClock(log)
        memory = HostMemory()
        moves = move if stepper and not workload.part else lambda batch: batch
        after_step = memory.note if place.cycle else lambda: None
        loop = Loop(workload, feed, moves, stepper, clock, after_step)
        if place.cycle:
            memory.begin()
        steps = loop.run(duration, report)
        log.close()
        stats = None
        if stepper and device.type == "cuda":
            stats = TorchFramework().allocator_stats()
        report.tell(
            steps=steps,
            samples=steps * workload.step_samples,
            last_loss=stepper.last_loss() if stepper else None,
            device_memory=stats and {**asdict(stats), "cap": place.gpu_memory},
        )
        if place.profiled_steps:
            _profile(loop, report, device)
        if place.cycle and stepper:
            _finish_cycle(replace(loop, clock=StepClock()), stepper, report)
        if place.cycle:
            report.tell(host_memory=asdict(memory))
    finally:
        with report.phase("closing"):
            feed.close()


def _build(
    workload: Workload, report: RankReport
) -> tuple[models.Built | None, Data, models.Shape | None]:
    """The model (none where only loading is measured), the data, and their shape if it is ours."""
    shape = None
    if workload.is_own:
        with report.phase("build"):
            built = load_own(workload)
        assert built.own is not None
        with report.phase("data"):
            data = Data(built.own.data, collate=built.own.collate)
            report.tell(data=_own_data_facts(data.dataset, built.own.notes))
    else:
        with report.phase("data"):
            shape = models.shape_of(workload)
            data = build_data(workload, shape)
            cache = prepare_cache(workload, data) if report.place.rank == 0 else None
            if workload.ranks > 1:
                dist.barrier()  # nobody reads what the first may still evict
            report.tell(data={**data.facts, "cache": cache})
        if workload.part == LOADER_ONLY:
            return None, data, shape
        with report.phase("build"):
            built = models.build_model(workload, shape)
    parameters = models.parameters_of(built.model)
    report.tell(model={"name": workload.model, "parameters": parameters})
    return built, data, shape


def _own_data_facts(dataset: Dataset[Any], notes: tuple[str, ...]) -> dict[str, Any]:
    def length(dataset: Any) -> int | None:
        try:
            return len(dataset)
        except TypeError:  # an IterableDataset without an end
            return None

    if isinstance(dataset, IterableDataset):
        notes = (*notes, "every worker and rank goes through all of it, unless it shards itself")
    return {
        "name": "own",
        "samples": length(dataset),
        "of": length(dataset.dataset if isinstance(dataset, Subset) else dataset),
        "source": "the user's",
        "notes": list(notes),
    }


def _plan_facts(
    workload: Workload,
    per_epoch: int | None,
    pin: bool,
    built: models.Built | None,
    shape: models.Shape | None,
) -> dict[str, Any]:
    settings = {**to_json(workload), "pin": pin}
    if not workload.workers:
        settings |= {"prefetch": None, "persistent": None}
    if shape:
        settings |= {
            "image_size": shape.size or None,
            "frames": shape.frames or None,
            "length": shape.length or None,
            "classes": shape.classes,
        }
    if built is not None and built.own is not None and built.own.optimizer is not None:
        settings |= {**dict.fromkeys(_OPTIMIZER_SETTINGS), "optimizer": "the user's"}
    return {
        "knobs": settings,
        "batch": {
            "per_rank": workload.batch_size,
            "accumulate": workload.accumulate,
            "ranks": workload.ranks,
            "global": workload.global_batch,
        },
        "steps_per_epoch": per_epoch,
        "samples_per_epoch": per_epoch * workload.global_batch if per_epoch else None,
    }


def _profile(loop: Loop, report: RankReport, device: torch.device) -> None:
    from stepscope.workloads.frameworks.torch.profile import profile_steps

    place, one_step = report.place, replace(loop, clock=StepClock()).one_step
    with report.phase("profile"):
        try:
            found = profile_steps(one_step, place.profiled_steps, place.trace, str(device))
        except Exception as error:
            if place.ranks > 1:  # the others wait for a step that will not come
                raise
            found = {"error": f"A step failed under the profiler: {error}"}
        replace_atomically(place.profile, json.dumps(found, indent=1) + "\n")


def _finish_cycle(loop: Loop, stepper: Stepper, report: RankReport) -> None:
    """The rest of the cycle, with the batches of the loader, and what of its memory has a name."""
    parts = stepper.state_bytes()
    report.tell(parts=parts)
    for phase, size in rest_of_cycle(loop.workload.batch_size):
        with report.phase(phase.value):
            if phase is Phase.AGAIN:
                loop.one_step()
                continue
            batch = loop.move(loop.feed.next())
            if phase is Phase.EVALUATION:
                report.tell(parts={**parts, "inputs": batches.bytes_in(batch)})
                if note := stepper.evaluate(batch):
                    report.tell(note=note)
            elif (part := batches.first_samples(batch, loop.workload.batch_size, size)) is not None:
                stepper.batch(part, last=True)
                stepper.step()


@dataclass(frozen=True)
class Loop:
    """Takes steps: waits for batches, copies them, computes, with every part timed."""

    workload: Workload
    feed: batches.Feed
    move: Callable[[Any], Any]
    stepper: Stepper | None
    clock: StepClock
    after_step: Callable[[], None]

    def run(self, duration: Duration, report: RankReport) -> int:
        """All steps of the trial; the first is timed apart: it builds, tunes and compiles."""
        taken, planned = 0, duration.total
        began = time.monotonic()
        report.tell(phase="first step", planned_steps=planned)
        self.clock.begin()
        try:
            while duration.goes_on():
                if duration.total != planned:
                    planned = duration.total
                    report.tell(planned_steps=planned)
                self.one_step()
                taken += 1
                if taken == 1:
                    report.took("first_step", time.monotonic() - began)
                    report.tell(phase="training")
        except BaseException:
            with suppress(Exception):  # a device that failed may fail again: the first error counts
                self.clock.finish()  # the steps before it are kept
            raise
        self.clock.finish()
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
