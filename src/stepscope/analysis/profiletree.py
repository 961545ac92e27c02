"""Which operator called which, and so what each took itself: from the calls in a trace.

The profiler can add this up too, as `key_averages()`, and gives the same. But it makes a Python
object of each of hundreds of thousands of events first: seconds, and a gigabyte that a trial
under a limit of memory may not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["operator", "runtime", "annotation"]
"""`runtime` is a call into CUDA, `annotation` a stretch of code that was given a name."""


class Call(NamedTuple):
    """Something that a thread of the host did for a while."""

    begin_us: float
    us: float
    name: str
    kind: Kind
    correlation: int | None = None
    """Shared with the work of the device that it asked for."""


@dataclass(frozen=True)
class Operator:
    """An operator, or a call into CUDA (`runtime`), all its calls together.

    `self` is without the operators that it calls, so that these times add up.
    """

    name: str
    kind: Kind
    calls: int = 0
    self_cpu_us: float = 0.0
    cpu_us: float = 0.0
    self_cuda_us: float = 0.0
    """Of the kernels and copies that it asked for itself."""
    cuda_us: float = 0.0


class _Open:
    """A call that goes on while others are looked at: those that begin meanwhile are inside it."""

    def __init__(self, call: Call, outer: _Open | None) -> None:
        self.call = call
        self.end_us = call.begin_us + call.us
        self.inner: list[_Open] = []
        self.inner_us = 0.0
        self.self_cuda_us = 0.0
        self.cuda_us = 0.0
        if outer is not None:  # the clocks of host and CUDA differ: it may seem to end too late
            self.end_us = min(self.end_us, outer.end_us)
            outer.inner_us += self.end_us - call.begin_us
            outer.inner.append(self)

    @property
    def again(self) -> _Open | None:
        """The only call inside, where it has the same name: PyTorch takes the two for one."""
        same = len(self.inner) == 1 and self.inner[0].call.name == self.call.name
        return self.inner[0] if same else None


def operators_of(
    threads: Iterable[list[Call]], device_us: Mapping[int, float]
) -> tuple[Operator, ...]:
    """What each operator and each call into CUDA took. `device_us` is by correlation."""
    totals: dict[tuple[str, Kind], Operator] = {}
    for calls in threads:
        for done in _nested(calls, device_us):
            key = (done.call.name, done.call.kind)
            if done.call.kind != "annotation":
                totals[key] = _with(totals.get(key, Operator(*key)), done)
    return tuple(totals.values())


def _nested(calls: list[Call], device_us: Mapping[int, float]) -> Iterator[_Open]:
    """Every call of a thread, once all is known that was called meanwhile."""
    around: list[_Open] = []
    for call in sorted(calls, key=lambda each: (each.begin_us, -each.us)):
        while around and around[-1].end_us <= call.begin_us:
            yield around.pop()
        around.append(_Open(call, around[-1] if around else None))
        if call.correlation is not None:
            _give(device_us.get(call.correlation, 0.0), around)
    yield from reversed(around)


def _give(us: float, around: list[_Open]) -> None:
    """Work of the device is that of the innermost operator; those around it called for it."""
    operators = [each for each in around if each.call.kind == "operator"]
    for each in operators:
        each.cuda_us += us
    for each in operators[-1:]:
        each.self_cuda_us += us


def _with(so_far: Operator, done: _Open) -> Operator:
    again = done.again
    return Operator(
        name=so_far.name,
        kind=so_far.kind,
        calls=so_far.calls + (again is None),
        self_cpu_us=so_far.self_cpu_us + done.call.us - done.inner_us,
        cpu_us=so_far.cpu_us + done.call.us - (again.call.us if again else 0.0),
        self_cuda_us=so_far.self_cuda_us + done.self_cuda_us,
        cuda_us=so_far.cuda_us + done.cuda_us - (again.cuda_us if again else 0.0),
    )
