"""Tripathi's estimate of 2019, exactly, as the baseline: a line through two small batches.

Two fresh processes train batches of 10 and 50 for 20 iterations; what the allocator holds at the
end of each, averaged over the last 15, gives the line. Beside it, her equation 4.1 with the sizes
of all layers in the place of measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from stepscope.advice.answer import Batch, Effort, Fit, Linear2019, Room, Verdict
from stepscope.advice.prober import Probes
from stepscope.analysis.memory_model import layers_2019, linear_2019
from stepscope.errors import BadWorkload
from stepscope.trials.limits import size_text
from stepscope.workloads.probing import Ask, Layer, Told
from stepscope.workloads.spec import Workload

GiB = 1 << 30
RESERVES = (0, GiB, 3 * GiB // 2)
_BATCHES = (10, 50)
_ITERATIONS, _AVERAGED = 20, 15


def fit_2019(probes: Probes, workload: Workload, room: Room, show: Callable[[str], None]) -> Fit:
    """Her answer, and nothing of ours in it."""
    cap = room.limit if room.asked is not None else None
    probed: list[Told] = []
    tried = ooms = 0
    small, large = _BATCHES
    while True:
        show(f"batches {small} and {large}, {_ITERATIONS} iterations each")
        probed = [_probe(probes, batch, cap) for batch in (small, large)]
        tried += 2
        ooms += sum(each.is_oom for each in probed)
        if all(each.is_ok for each in probed):
            break
        odd = next((each for each in probed if not each.is_ok and not each.is_oom), None)
        if odd:
            raise BadWorkload(f"A batch of {odd.batch} failed: {odd.message}", odd.hint)
        if large <= 2:
            return _does_not_fit(probes, workload, room, Effort(0.0, tried, ooms))
        small, large = max(1, small // 2), max(2, large // 2)
    held = [fmean(each.reserved[-_AVERAGED:]) for each in probed]
    layers = probes.layers()
    linear = _linear(small, large, held, room.limit, workload.ranks, layers, probes)
    batch = linear.by_reserve[0][1]
    return Fit(
        verdict=_verdict(batch, linear),
        says=(
            f"The 2019 method estimates {batch:,} with no reserve in {size_text(room.limit)}: "
            f"{size_text(int(linear.per_sample))} a sample and {size_text(int(linear.fixed))} "
            "beside. It is a line through two small batches: nothing larger was tried."
        ),
        model=workload.model,
        knobs=workload.as_dict(),
        method="linear2019",
        room=room,
        subject=probes.subject,
        effort=Effort(0.0, tried, ooms),
        largest=Batch(batch, 0, 0, None, False) if batch else None,
        linear=linear,
        notes=probes.subject.notes,
    )


def _verdict(batch: int, linear: Linear2019) -> Verdict:
    if linear.per_sample <= 0:
        return "cannot tell"
    return "fits" if batch else "does not fit"


def _does_not_fit(probes: Probes, workload: Workload, room: Room, effort: Effort) -> Fit:
    return Fit(
        verdict="does not fit",
        says=f"Not even two small batches fit into {size_text(room.limit)}: there is no line.",
        model=workload.model,
        knobs=workload.as_dict(),
        method="linear2019",
        room=room,
        subject=probes.subject,
        effort=effort,
    )


def _probe(probes: Probes, batch: int, cap: int | None) -> Told:
    ask = Ask((batch,), cap, _ITERATIONS, cycle=False)
    return probes.ask([ask])[0].last


def _linear(
    small: int,
    large: int,
    held: Sequence[float],
    limit: int,
    gpus: int,
    layers: Sequence[Layer],
    probes: Probes,
) -> Linear2019:
    by_reserve = []
    for reserve in RESERVES:
        per_sample, fixed, batch = linear_2019(small, held[0], large, held[1], limit, reserve)
        by_reserve.append((reserve, batch or 0))
    by_layers = None
    if layers:
        sizes = [(layer.parameters, layer.output) for layer in layers]
        by_layers = layers_2019(sizes, probes.subject.sample_bytes, layers[-1].output, limit)
    note = ""
    if (small, large) != _BATCHES:
        note = f"batches {small} and {large} in the place of 10 and 50, which did not fit"
    if per_sample <= 0:
        note = "memory did not grow from the small batch to the large one: there is no line"
    return Linear2019(
        small, large, held[0], held[1], per_sample, fixed, tuple(by_reserve), gpus,
        tuple(layers), by_layers, note,
    )  # fmt: skip
