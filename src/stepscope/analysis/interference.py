"""Who else was at work while a trial took its steady steps: other processes on its CPUs or its GPU,
the hypervisor, heat. What a trial tells while that goes on is not what it would tell alone."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.causes.thresholds import limit
from stepscope.analysis.series import Series, amount_of
from stepscope.analysis.summary import Recorded
from stepscope.analysis.trial import Measurement

_LEAST_STEAL = 0.05
"""Of the machine's cores: less is the hypervisor's own housekeeping."""


def disturbances(measured: Measurement, recorded: Recorded) -> tuple[str, ...]:
    """In words, a reason each; nothing where the trial was alone, or nobody can tell."""
    begin, end = measured.begin_ns, measured.end_ns
    if begin is None or end is None or end <= begin:
        return ()
    found = [_others_on_cpus(measured), _steal(measured, recorded, begin, end)]
    found += [_others_on_gpu(recorded, begin, end), _heat(recorded, begin, end)]
    return tuple(text for text in found if text)


def _others_on_cpus(measured: Measurement) -> str:
    if not measured.is_disturbed:
        return ""
    return f"others used {measured.others_cores:.1f} of {measured.host_cpus:g} cores"


def _steal(measured: Measurement, recorded: Recorded, begin: int, end: int) -> str:
    stolen = _mean([recorded.of("host_steal", "host")], begin, end)
    if stolen is None or stolen < _LEAST_STEAL * (measured.host_cpus or 1.0):
        return ""
    return f"the hypervisor gave {stolen:.1f} cores to others"


def _others_on_gpu(recorded: Recorded, begin: int, end: int) -> str:
    share = _reading(recorded, "gpu_others", begin, end)
    if share is None or share < limit("others_gpu"):
        return ""
    return f"other processes used its GPU {share:.0%} of the time"


def _heat(recorded: Recorded, begin: int, end: int) -> str:
    share = _reading(recorded, "gpu_slowed_heat", begin, end)
    if share is None or share < limit("slowed"):
        return ""
    return f"heat held its GPU's clocks down {share:.0%} of the time"


def _mean(series: Sequence[Series], begin: int, end: int) -> float | None:
    """Of rates over a stretch of time, all together."""
    known = [amount for each in series if (amount := amount_of(each, begin, end)) is not None]
    seconds = sum(amount.seconds for amount in known)
    return sum(amount.total for amount in known) / seconds if seconds > 0 else None


def _reading(recorded: Recorded, metric: str, begin: int, end: int) -> float | None:
    """The mean of a gauge over the GPUs of the trial; the highest of them."""
    means = [
        float(inside.value.mean())
        for gpu in recorded.used_gpus
        if len(inside := gpu.of(metric).between(begin, end))
    ]
    return max(means, default=None)
