"""What a reader must know of the GPUs of a run, in sentences."""

from __future__ import annotations

from stepscope.analysis.gpus import RecordedGpu
from stepscope.analysis.summary import Recorded
from stepscope.report.format import count_text, share_text

_COUNTED_BUSY, _WITHOUT_WORK = 0.5, 0.1
_DISAGREE = 0.05
"""Power readings and the energy counter of a GPU differ by less than this in most runs."""


def gpu_notes(recorded: Recorded, trains: bool) -> list[str]:
    """All notes on GPUs; `trains` says whether the run is one that could have used one."""
    used = recorded.used_gpus
    return [
        *_not_used(recorded, trains),
        *_busy_without_work(recorded),
        *_edge_of_memory(used),
        *_energy(used),
        *(note for gpu in used for note in _memory_errors(gpu)),
    ]


def _not_used(recorded: Recorded, trains: bool) -> list[str]:
    used = {each.gpu.uuid for each in recorded.used_gpus}
    idle = [each.gpu.label for each in recorded.all_gpus
            if each.series and each.gpu.uuid not in used]  # fmt: skip
    if not idle or not (used or trains):
        return []
    if not used:
        busy = "".join(f". {text}" for text in _busy_for_others(recorded))
        return [f"The run used no GPU: nothing of it was seen on {_listed(idle)}{busy}"]
    verb = "was" if len(idle) == 1 else "were"
    return [f"{_listed(idle)} {verb} not used by the run, and in no mean or sum of it"]


def _busy_for_others(recorded: Recorded) -> list[str]:
    """GPUs at work though none of the run's processes is listed on them."""
    return [
        f"{row.gpu.label} was busy (SM activity {share_text(row.figures.gpu_sm)}), but for others, "
        "as far as the driver tells"
        for row in recorded.gpu_use.each
        if row.figures.gpu_sm is not None and row.figures.gpu_sm > _WITHOUT_WORK
    ]


def _listed(labels: list[str]) -> str:
    """GPU 1; GPU 1 and GPU 2; GPU 1 and 6 others."""
    if len(labels) < 3:
        return " and ".join(labels)
    return f"{labels[0]} and {len(labels) - 1} others"


def _busy_without_work(recorded: Recorded) -> list[str]:
    """Utilisation is what most tools show, and it can be high while nothing is computed."""
    gpu = recorded.gpu_use.together
    if gpu.gpu_utilization is None or gpu.gpu_sm is None:
        return []
    if gpu.gpu_utilization <= _COUNTED_BUSY or gpu.gpu_sm >= _WITHOUT_WORK:
        return []
    one = len(recorded.used_gpus) == 1
    return [
        f"The {'GPU' if one else 'GPUs'} counted as busy {share_text(gpu.gpu_utilization)} of the "
        f"time while {'its' if one else 'their'} multiprocessors had work "
        f"{share_text(gpu.gpu_sm)} of the time: copies or tiny kernels"
    ]


def _edge_of_memory(used: tuple[RecordedGpu, ...]) -> list[str]:
    def counted(metric: str) -> float:
        return sum(float(gpu.of(metric).value[-1]) for gpu in used if len(gpu.of(metric)))

    retries, ooms = counted("gpu_alloc_retries"), counted("gpu_alloc_ooms")
    notes = []
    if retries:
        notes.append(
            f"The allocator had to free its cache {_times(retries)}: the batch is at the edge of "
            "GPU memory"
        )
    if ooms:
        notes.append(f"GPU memory could not be allocated {_times(ooms)}")
    return notes


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count_text(count)} times"


def _energy(used: tuple[RecordedGpu, ...]) -> list[str]:
    """Where the two ways to know the energy disagree, a reader of both must know which it is."""
    apart = [gpu for gpu in used if abs(gpu.counter_over_readings - 1) > _DISAGREE]
    if not apart:
        return []
    most = max((gpu.counter_over_readings - 1 for gpu in apart), key=abs)
    than = "more" if most > 0 else "less"
    return [
        f"Energy is that of the energy counters, up to {share_text(abs(most))} {than} than the "
        "power readings add up to"
    ]


def _memory_errors(gpu: RecordedGpu) -> list[str]:
    errors = gpu.of("gpu_ecc_uncorrected").value
    came = errors[-1] - errors[0] if len(errors) else 0
    if came <= 0:
        return []
    what = "An error" if came == 1 else f"{count_text(came)} errors"
    return [f"{what} in the memory of {gpu.gpu.label} could not be corrected during the run"]
