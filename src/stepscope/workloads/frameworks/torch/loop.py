"""The training of a trial, the same for every model and dataset."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset

from stepscope.errors import WorkloadError
from stepscope.inject.masking import mask_text
from stepscope.records.codec import to_json
from stepscope.runs.files import write_json
from stepscope.steplog import StepLog
from stepscope.workloads.frameworks.torch import batches, models
from stepscope.workloads.frameworks.torch import device as devices
from stepscope.workloads.frameworks.torch.adapter import TorchFramework
from stepscope.workloads.frameworks.torch.clock import DeviceClock, Duration, HostClock, StepClock
from stepscope.workloads.frameworks.torch.custom import load_custom
from stepscope.workloads.frameworks.torch.data import Data, build_data, prepare_cache
from stepscope.workloads.frameworks.torch.meters import HostMemory
from stepscope.workloads.frameworks.torch.stepper import Phase, Stepper, rest_of_cycle
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import LOADER_ONLY, RESIDENT, Workload

_OPTIMIZER_SETTINGS = ("lr", "momentum", "weight_decay")


def train(workload: Workload, placement: RankPlacement, report: RankReport) -> None:
    device = devices.choose_device(workload, placement)
    if placement.threads:
        torch.set_num_threads(placement.threads)
    devices.cap_memory(device, placement.gpu_memory)
    precision = devices.set_precision(workload.precision, device)
    report.update(
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        versions=devices.versions(),
        threads=torch.get_num_threads(),
    )
    torch.manual_seed(workload.seed)
    with devices.process_group(placement.ranks, device):
        _train(workload, report, device, precision)
    report.update(done=True)


def _train(
    workload: Workload, report: RankReport, device: torch.device, precision: devices.Precision
) -> None:
    placement = report.placement
    built, data, shape = _build(workload, report)
    pin = workload.pin
    if pin is None:  # on with a GPU, even if only loading is measured
        pin = workload.device != "cpu" and torch.cuda.is_available()
    move = batches.mover(device, workload.channels_last)
    if workload.part == RESIDENT:
        source = batches.LoaderFeed(batches.make_loader(workload, placement, data, pin=False))
        feed: batches.Feed = batches.ResidentFeed(move(source.next()), source.batches_per_epoch)
        source.close()
    else:
        loader = batches.make_loader(workload, placement, data, pin)
        feed = batches.LoaderFeed(loader, workload.accumulate)
    try:
        stepper = None
        if built is not None and workload.part != LOADER_ONLY:
            with report.phase("build"):
                stepper = Stepper(workload, built, device, precision)
        count = feed.batches_per_epoch
        per_epoch = count // workload.accumulate if count else None
        report.update(**_plan_facts(workload, per_epoch, pin, built, shape))
        if workload.epochs is not None and count is None:
            raise WorkloadError(
                "`--epochs` needs data with a length", "Use --steps or --seconds instead"
            )
        if workload.epochs is not None and not per_epoch:
            raise WorkloadError(
                f"An epoch has fewer batches than `--accumulate {workload.accumulate}` needs for a "
                "step",
                "Use a smaller --accumulate or --batch-size, or --steps instead of --epochs",
            )
        duration = Duration(
            workload, per_epoch, lambda number: devices.broadcast(number, placement.ranks, device)
        )
        log = StepLog(placement.steps)
        clock = DeviceClock(log, device) if device.type == "cuda" else HostClock(log)
        memory = HostMemory()
        moves = move if stepper and not workload.part else lambda batch: batch
        after_step = memory.record_step if placement.cycle else lambda: None
        loop = Loop(workload, feed, moves, stepper, clock, after_step)
        if placement.cycle:
            memory.begin()
        steps = loop.run(duration, report)
        log.close()
        stats = None
        if stepper and device.type == "cuda":
            stats = TorchFramework().allocator_stats()
        report.update(
            steps=steps,
            samples=steps * workload.step_samples,
            last_loss=stepper.last_loss() if stepper else None,
            device_memory=stats and {**asdict(stats), "cap": placement.gpu_memory},
        )
        if placement.profiled_steps:
            _profile(loop, report, device)
        if placement.cycle and stepper:
            _finish_cycle(replace(loop, clock=StepClock()), stepper, report)
        if placement.cycle:
            report.update(host_memory=asdict(memory))
    finally:
        with report.phase("closing"):
            feed.close()


def _build(
    workload: Workload, report: RankReport
) -> tuple[models.Built | None, Data, models.Shape | None]:
    """Model (None if only loading is measured), data, and the shape of a built-in model."""
    shape = None
    if workload.is_custom:
        with report.phase("build"):
            built = load_custom(workload)
        assert built.custom is not None
        with report.phase("data"):
            data = Data(built.custom.data, collate=built.custom.collate)
            report.update(data=_custom_data_facts(data.dataset, built.custom.notes))
    else:
        with report.phase("data"):
            shape = models.shape_of(workload)
            data = build_data(workload, shape)
            cache = prepare_cache(workload, data) if report.placement.rank == 0 else None
            if workload.ranks > 1:
                dist.barrier()  # no rank reads files that rank 0 may still evict
            report.update(data={**data.facts, "cache": cache})
        if workload.part == LOADER_ONLY:
            return None, data, shape
        with report.phase("build"):
            built = models.build_model(workload, shape)
    parameters = models.parameters_of(built.model)
    report.update(model={"name": workload.model, "parameters": parameters})
    return built, data, shape


def _custom_data_facts(dataset: Dataset[Any], notes: tuple[str, ...]) -> dict[str, Any]:
    def length(dataset: Any) -> int | None:
        try:
            return len(dataset)
        except TypeError:  # an IterableDataset without a length
            return None

    if isinstance(dataset, IterableDataset):
        notes = (
            *notes,
            "every worker and rank reads the whole dataset unless it shards itself",
        )
    return {
        "name": "custom",
        "samples": length(dataset),
        "available_samples": length(dataset.dataset if isinstance(dataset, Subset) else dataset),
        "source": "custom",
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
            "sequence_length": shape.sequence_length or None,
            "classes": shape.classes,
        }
    if built is not None and built.custom is not None and built.custom.optimizer is not None:
        settings |= {**dict.fromkeys(_OPTIMIZER_SETTINGS), "optimizer": "custom"}
    return {
        "settings": settings,
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

    placement, one_step = report.placement, replace(loop, clock=StepClock()).one_step
    with report.phase("profile"):
        try:
            profile = profile_steps(
                one_step, placement.profiled_steps, placement.trace, str(device)
            )
        except Exception as error:
            if placement.ranks > 1:  # the other ranks wait for this step
                raise
            profile = {"error": mask_text(f"A step failed under the profiler: {error}")}
        write_json(placement.profile, profile)


def _finish_cycle(loop: Loop, stepper: Stepper, report: RankReport) -> None:
    """Run the rest of the cycle with batches of the loader, and report the parts of its memory."""
    parts = stepper.state_bytes()
    report.update(parts=parts)
    for phase, size in rest_of_cycle(loop.workload.batch_size):
        with report.phase(phase.value):
            if phase is Phase.STEP:
                loop.one_step()
                continue
            batch = loop.move(loop.feed.next())
            if phase is Phase.EVALUATION:
                report.update(parts={**parts, "inputs_bytes": batches.bytes_in(batch)})
                if note := stepper.evaluate(batch):
                    report.update(note=note)
            elif (part := batches.first_samples(batch, loop.workload.batch_size, size)) is not None:
                stepper.batch(part, last=True)
                stepper.step()


@dataclass(frozen=True)
class Loop:
    """Takes steps and times their parts: data wait, copy and computation."""

    workload: Workload
    feed: batches.Feed
    move: Callable[[Any], Any]
    stepper: Stepper | None
    clock: StepClock
    after_step: Callable[[], None]

    def run(self, duration: Duration, report: RankReport) -> int:
        """Take all steps and return their number. The first may compile and is timed separately."""
        taken, planned = 0, duration.total
        start = time.monotonic()
        report.update(phase="first_step", planned_steps=planned)
        self.clock.begin()
        try:
            while duration.take_step():
                if duration.total != planned:
                    planned = duration.total
                    report.update(planned_steps=planned)
                self.one_step()
                taken += 1
                if taken == 1:
                    report.add_time("first_step", time.monotonic() - start)
                    report.update(phase="training")
        except BaseException:
            with suppress(Exception):  # a failed device may fail again: keep the first error
                self.clock.finish()  # keep the steps before the error
            raise
        self.clock.finish()
        report.add_time("training", time.monotonic() - start)
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
