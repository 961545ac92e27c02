"""What a trace of the PyTorch profiler comes to: operators, kernels, copies, memory, and the steps.

It is the Chrome trace that `torch.profiler` exports, the same that Perfetto shows.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from stepscope.analysis.profiletree import Call, Kind, Operator, operators_of

Event = Mapping[str, Any]

DIRECTIONS = {
    "HtoD": "to_device",
    "DtoH": "from_device",
    "DtoD": "within_device",
    "PtoP": "between_devices",
    "HtoH": "host",
}
"""Where a copy goes, by what CUPTI calls it; anything else is `other`."""

_HOST: Mapping[str, Kind] = {
    "cpu_op": "operator",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
}
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MEMORY = "[memory]"

_COPY_NAME = re.compile(r"Memcpy (\wto\w)")
_EVENTS_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(r"[\s,]*")
_MOST_CHARACTERS = 16 << 20
"""No event is longer: what cannot be read within so much is none."""


def events_of(chunks: Iterable[str]) -> Iterator[Event]:
    """The events of a trace, one at a time: those of a large one would fill the memory.

    ValueError where it is no trace, or is damaged.
    """
    decode = json.JSONDecoder(strict=False).raw_decode
    text, begun = "", False
    for chunk in chunks:
        text, place = text + chunk, 0
        if not begun and (found := _EVENTS_BEGIN.search(text)):
            begun, place = True, found.end()
        while begun:
            between = _BETWEEN_EVENTS.match(text, place)
            place = between.end() if between else place
            if text.startswith("]", place):
                return
            try:
                event, place = decode(text, place)
            except ValueError:
                break  # the rest of it is in the next chunk
            if not isinstance(event, dict):
                raise ValueError("the trace has something else among its events")
            yield event
        text = text[place:]
        if len(text) > _MOST_CHARACTERS:
            break
    raise ValueError("the trace is damaged" if begun else "this is no trace: it has no events")


@dataclass(frozen=True)
class Kernel:
    """A kernel of the device, all its runs together."""

    name: str
    calls: int
    us: float


@dataclass(frozen=True)
class Copied:
    """Copies in one direction."""

    calls: int
    bytes: int
    us: float
    pageable_bytes: int
    """Part of the bytes: from or to host memory that is not pinned. The host waits for those."""


@dataclass(frozen=True)
class Peak:
    """Most that was held at once; of the host, beyond what was held when the profiling began."""

    allocated: int
    """By tensors."""
    reserved: int | None
    """By the allocator; the host has none that reserves."""


@dataclass(frozen=True)
class TraceFigures:
    """What the host did and what the device, memory, and how long the steps took."""

    events: int
    step_us: tuple[float, ...]
    """How long the host took for each step."""
    operators: tuple[Operator, ...]
    kernels: tuple[Kernel, ...]
    """The longest first."""
    launches: int
    """Calls that start kernels; a CUDA graph is one call for many."""
    copies: Mapping[str, Copied]
    """By direction."""
    memset_us: float
    memory: Mapping[str, Peak]
    """By device."""
    has_device: bool
    """Whether calls into CUDA were seen. If not, nothing is known of what a device did."""


class _Work(NamedTuple):
    """Something that the device did for a while."""

    category: str
    name: str
    us: float
    bytes: int
    correlation: int | None


class _Change(NamedTuple):
    """An allocation, or its end."""

    device: str
    before: int
    now: int
    reserved: int


def trace_figures(events: Iterable[Event]) -> TraceFigures:
    """What the events of a trace come to."""
    count = 0
    threads: dict[Hashable, list[Call]] = defaultdict(list)
    works: list[_Work] = []
    changes: list[_Change] = []
    for event in events:
        count += 1
        category = str(event.get("cat"))
        if category in _HOST:
            threads[event.get("pid"), event.get("tid")].append(_call(event, _HOST[category]))
        elif category in _DEVICE:
            works.append(_work(event, category))
        elif event.get("name") == _MEMORY:
            changes.append(_change(event))
    calls = [call for each in threads.values() for call in each]
    return TraceFigures(
        events=count,
        step_us=tuple(call.us for call in calls if call.name.startswith("ProfilerStep#")),
        operators=operators_of(threads.values(), _us_by_correlation(works)),
        kernels=_kernels(works),
        launches=sum(call.kind == "runtime" and _starts_kernels(call.name) for call in calls),
        copies=_copies(works),
        memset_us=sum(work.us for work in works if work.category == "gpu_memset"),
        memory=_peaks(changes),
        has_device=any(call.kind == "runtime" for call in calls),
    )


def direction_of(copy: str) -> str:
    """Where a copy goes, by its name: "Memcpy HtoD (Pinned -> Device)" is `to_device`."""
    found = _COPY_NAME.match(copy)
    ends = found[1].replace("A", "D") if found else ""  # an array is memory of the device too
    return DIRECTIONS.get(ends, "other")


def _starts_kernels(call: str) -> bool:
    """`cudaLaunchKernel`, `cuLaunchKernelEx`, `cudaGraphLaunch` and their like."""
    return "Launch" in call and "HostFunc" not in call


def _us_by_correlation(works: Iterable[_Work]) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for work in works:
        if work.correlation is not None:
            found[work.correlation] += work.us
    return dict(found)


def _kernels(works: Iterable[_Work]) -> tuple[Kernel, ...]:
    by_name = _grouped((w for w in works if w.category == "kernel"), lambda work: work.name)
    kernels = (Kernel(name, len(runs), sum(r.us for r in runs)) for name, runs in by_name.items())
    return tuple(sorted(kernels, key=lambda kernel: -kernel.us))


def _copies(works: Iterable[_Work]) -> dict[str, Copied]:
    copies = (work for work in works if work.category == "gpu_memcpy")
    return {
        direction: Copied(
            calls=len(alike),
            bytes=sum(copy.bytes for copy in alike),
            us=sum(copy.us for copy in alike),
            pageable_bytes=sum(c.bytes for c in alike if "pageable" in c.name.lower()),
        )
        for direction, alike in _grouped(copies, lambda copy: direction_of(copy.name)).items()
    }


def _peaks(changes: Iterable[_Change]) -> dict[str, Peak]:
    by_device = _grouped(changes, lambda change: change.device)
    return {device: _peak(device, of_device) for device, of_device in by_device.items()}


def _peak(device: str, changes: Sequence[_Change]) -> Peak:
    highest = max(max(change.before, change.now) for change in changes)
    if device == "cpu":  # PyTorch counts it from the first profiler of the process on
        return Peak(highest - changes[0].before, None)
    return Peak(highest, max(change.reserved for change in changes))


def highest(peaks: Sequence[Peak]) -> Peak:
    """The most of each."""
    reserved = [peak.reserved for peak in peaks if peak.reserved is not None]
    return Peak(max(peak.allocated for peak in peaks), max(reserved, default=None))


Item = TypeVar("Item")


def _grouped(items: Iterable[Item], key: Callable[[Item], str]) -> dict[str, list[Item]]:
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def _call(event: Event, kind: Kind) -> Call:
    return Call(
        begin_us=_number(event, "ts"),
        us=_number(event, "dur"),
        name=_name(event),
        kind=kind,
        correlation=_arguments(event).get("correlation"),
    )


def _work(event: Event, category: str) -> _Work:
    told = _arguments(event)
    return _Work(
        category=category,
        name=_name(event),
        us=_number(event, "dur"),
        bytes=int(_number(told, "bytes")),
        correlation=told.get("correlation"),
    )


def _change(event: Event) -> _Change:
    told = _arguments(event)
    now = int(_number(told, "Total Allocated"))
    return _Change(
        device=_device_name(told),
        before=now - int(_number(told, "Bytes")),
        now=now,
        reserved=int(_number(told, "Total Reserved")),
    )


def _device_name(told: Event) -> str:
    """As PyTorch writes it: `cpu`, `cuda:0`."""
    kind, number = told.get("Device Type"), told.get("Device Id", 0)
    if kind == 0:
        return "cpu"
    return f"cuda:{number}" if kind == 1 else f"device type {kind}:{number}"


def _name(event: Event) -> str:
    """Kept once, however many events have it."""
    return sys.intern(str(event.get("name", "")))


def _arguments(event: Event) -> Event:
    told = event.get("args")
    return told if isinstance(told, dict) else {}


def _number(of: Event, key: str) -> float:
    """0 where it is left out: what has no length or size is written without."""
    value = of.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0.0
