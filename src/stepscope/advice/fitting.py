"""`fit`, as it is asked for: on the GPU that is there, or on the host; found before, or anew."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from stepscope.advice import cache, hostfit
from stepscope.advice.answer import Fit, Room
from stepscope.advice.fit import Options, fit_on_gpu
from stepscope.advice.linear2019 import fit_2019
from stepscope.advice.prober import Prober
from stepscope.advice.room import GpuHere, gpu_here, gpu_room, probe_environment
from stepscope.advice.wording import answer, host_room, memory_free
from stepscope.errors import CannotTry
from stepscope.trials.limits import size_text
from stepscope.workloads.probing import Subject
from stepscope.workloads.spec import Workload, nearest

METHODS = ("auto", "linear2019")
_TENANTS = "on this GPU already: "
"""How the note begins that names them."""
_SURELY = 2 << 30
"""So much more than what is asked for, context and all, is enough."""


@dataclass(frozen=True)
class Asked:
    """What a user asked of `fit`."""

    gpu_memory: int | None = None
    """Bytes that the framework may take on the GPU, as of a trial."""
    memory: int | None = None
    """Bytes of host memory."""
    headroom: int = 0
    """Bytes to leave free."""
    headroom_share: float = 0.0
    """The same as a part of what there is to fit into, below 1."""
    gpus: tuple[str, ...] | None = None
    cards: tuple[int, ...] = ()
    """Other sizes to foresee batches for; nothing: those of the usual cards."""
    method: str = "auto"
    prove: bool = False
    estimate: bool = False
    fresh: bool = False
    """Whether to look anew, also where the answer is known."""
    hang_s: float = 300.0


Say = Callable[[str], None]


def fit_workload(workload: Workload, asked: Asked, tell: Say, show: Say) -> Fit:
    """The answer, from the cache where nothing has changed that it depends on."""
    _check(workload, asked)
    gpu = None
    if workload.device != "cpu":
        gpu = gpu_here(asked.gpus, probe_environment(None), workload.ranks)
    if gpu is None:
        _need_no_gpu(workload, asked, tell)
    key = cache.key_of(workload, _settings(asked, gpu))
    known = None if asked.fresh or asked.prove else cache.recall(key)
    if known is not None:
        return as_of_now(known, gpu)
    began = time.monotonic()
    headroom = _headroom(asked, gpu)
    if gpu is None:
        fit = hostfit.fit_on_host(workload, asked.memory, headroom, asked.hang_s, tell, show)
    else:
        fit = _on_gpu(workload, asked, gpu, gpu_room(gpu, asked.gpu_memory, headroom), show)
    fit = replace(
        fit,
        effort=replace(fit.effort, seconds=time.monotonic() - began),
        made=datetime.now().astimezone().isoformat(timespec="seconds"),
        subject=_on(fit.subject, gpu),
        environment={"gpu": asdict(gpu) if gpu else None},
        notes=(*fit.notes, *_less_than_asked(fit.room)),
    )
    cache.remember(key, fit)
    return fit


def as_of_now(known: Fit, gpu: GpuHere | None) -> Fit:
    """An answer of before, without those who were on the GPU then."""
    if gpu is None:
        return known
    return replace(
        known,
        room=replace(known.room, free=gpu.free, tenants=gpu.tenants),
        notes=tuple(note for note in known.notes if not note.startswith(_TENANTS)),
    )


def _headroom(asked: Asked, gpu: GpuHere | None) -> int:
    """Bytes to leave free of what there is here."""
    if not asked.headroom_share:
        return asked.headroom
    room = hostfit.host_room(asked.memory, 0) if gpu is None else gpu_room(gpu, asked.gpu_memory, 0)
    return int(asked.headroom_share * room.limit)


def _less_than_asked(room: Room) -> tuple[str, ...]:
    """That the limit was another than the one that was given, which a user must know."""
    had = room.limit + room.headroom
    if room.asked is None or had >= room.asked:
        return ()
    return (
        f"--gpu-memory {size_text(room.asked)} cannot be had now: {size_text(had)} are free for "
        "PyTorch, and that is what was fitted into",
    )


def _on(subject: Subject | None, gpu: GpuHere | None) -> Subject | None:
    return replace(subject, device_name=gpu.name) if subject and gpu else subject


def _on_gpu(workload: Workload, asked: Asked, gpu: GpuHere, room: Room, show: Say) -> Fit:
    show(f"building {workload.short_name}")
    with Prober(workload, probe_environment(gpu), asked.hang_s) as prober:
        if prober.subject.device != "cuda":
            raise CannotTry(
                f"{gpu.name} is there, but this PyTorch cannot use it",
                "Install one built for CUDA, or give --device cpu",
            )
        if asked.method == "linear2019":
            return fit_2019(prober, workload, room, show)
        between = (min(asked.cards), max(asked.cards)) if asked.estimate and asked.cards else None
        options = Options(asked.estimate, asked.prove, _traced(between, gpu), asked.cards)
        found = fit_on_gpu(prober, room, options, show)
        host = host_room(workload, prober.subject.sample_bytes, asked.memory)
        return answer(found, workload, asked.method, options, host)


def _traced(between: tuple[int, int] | None, gpu: GpuHere) -> tuple[int, int] | None:
    """Between which sizes to trace, so that what is to be foreseen lies within: at most half of
    the GPU each, since both are there at once."""
    if between is None:
        return None
    low, high = between
    return int(0.8 * low), max(int(0.9 * low), min(int(0.9 * high), int(0.45 * gpu.free)))


def _check(workload: Workload, asked: Asked) -> None:
    if asked.method not in METHODS:
        raise CannotTry(f"--method {asked.method} is not known", nearest(asked.method, METHODS))
    if asked.headroom < 0:
        raise CannotTry("--headroom is less than nothing", "Give a size from 0 up")
    if workload.device == "cpu" and asked.gpus:
        raise CannotTry(
            f"--device cpu leaves out the GPU that --gpus {','.join(asked.gpus)} names",
            "Give one of them",
        )


def _need_no_gpu(workload: Workload, asked: Asked, tell: Say) -> None:
    """Without a GPU it is the host's memory that is fitted into."""
    is_left_out = workload.device == "cpu"
    for given, option in (
        (asked.gpu_memory is not None, "--gpu-memory"),
        (asked.cards, "--cards"),
        (asked.method == "linear2019", "--method linear2019"),
    ):
        if given and is_left_out:
            raise CannotTry(
                f"{option} is about a GPU, and --device cpu leaves it out",
                f"Leave out {option} to fit host memory, or --device cpu to fit the GPU's",
            )
        if given:
            raise CannotTry(
                f"{option} is about a GPU, and there is none to probe here",
                "Leave it out to fit host memory, or see: stepscope doctor",
            )
    if workload.device == "cuda":
        raise CannotTry("There is no GPU here", "Leave --device out, or see: stepscope doctor")
    if asked.prove:
        tell("--prove is for a GPU: on the host an answer passes in three fresh processes anyway")
    if asked.estimate:
        tell("--estimate is for a GPU: on the host batches are tried up to the limit")


def _settings(asked: Asked, gpu: GpuHere | None) -> dict[str, Any]:
    """What of the question and the machine an answer depends on."""
    told = asdict(replace(asked, fresh=False, hang_s=0.0, prove=False))
    if gpu is None:
        free = None if asked.memory is not None else memory_free() >> 28
        return {**told, "free": free, "cpus": os.cpu_count()}
    free_here = {"free": _free(asked.gpu_memory, gpu)}
    return {**told, "gpu": gpu.name, "total": gpu.total, "driver": gpu.driver, **free_here}


def _free(asked: int | None, gpu: GpuHere) -> int | str:
    """What is free, roughly; where that is enough for what was asked, no more matters."""
    is_enough = asked is not None and gpu.free - _SURELY >= asked
    return "covers" if is_enough else gpu.free >> 26
