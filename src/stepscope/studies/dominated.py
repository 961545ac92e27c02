"""What need not be tried since less ran out of memory already.

A trial is dominated by one that ran out of memory if it differs only in settings that can but need
more, or leave less: a larger batch, more workers, a lower limit. That holds nearly always, not
always: libraries choose other algorithms at other sizes. So a share of what would be skipped is
tried nevertheless, and one that trains ends the skipping.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepscope.analysis.study.records import Level
from stepscope.records import Outcome
from stepscope.studies.results import Result
from stepscope.studies.trial_spec import TrialSpec, levels_text

_MORE_DATA = ("batch_size", "image_size", "frames", "length")
_GROWS: dict[Outcome, tuple[str, ...]] = {
    Outcome.GPU_OOM: _MORE_DATA,
    Outcome.HOST_OOM: (*_MORE_DATA, "workers", "prefetch", "ranks", "samples"),
    Outcome.SHM_FULL: (*_MORE_DATA, "workers", "prefetch"),
}
"""Settings of which more needs more of what ran out."""
_ROOM: dict[Outcome, str] = {Outcome.GPU_OOM: "gpu_memory", Outcome.HOST_OOM: "memory"}
"""The limit of which less leaves less."""
_NO_MATTER = ("timeout", "hang", "seed", "lr", "momentum", "weight_decay")


Kind = tuple[Outcome, frozenset[tuple[str, Level]]]
"""What ran out, and all settings that must be equal to conclude from one trial to another."""


@dataclass(frozen=True)
class Dominance:
    """What is known of memory that ran out, and whether one may conclude from it."""

    ooms: Mapping[Kind, Sequence[TrialSpec]]
    share: float
    seed: int

    def reason(self, spec: TrialSpec) -> str:
        """Why a trial need not be run; nothing if it has to be."""
        found = self._below(spec)
        if found is None or self.is_tested(spec):
            return ""
        outcome, least = found
        names = sorted({*least.settings, *spec.settings})
        differ = {name: least.get(name) for name in names if least.get(name) != spec.get(name)}
        return f"{outcome.value} already with {levels_text(differ)}"

    def is_tested(self, spec: TrialSpec) -> bool:
        """Whether it is of the share that is tried in any case; the same every time."""
        drawn = zlib.crc32(f"{self.seed} {spec.key}".encode()) / 2**32
        return drawn < self.share

    def _below(self, spec: TrialSpec) -> tuple[Outcome, TrialSpec] | None:
        """One that ran out of memory with less."""
        if not self.ooms:
            return None
        for outcome in _GROWS:
            for least in self.ooms.get(_kind(outcome, spec), ()):
                if _needs_more(outcome, least, spec):
                    return outcome, least
        return None


def observed(
    results: Iterable[Result], specs: Mapping[str, TrialSpec], share: float, seed: int
) -> Dominance:
    """What results teach. One trial that trained although it was dominated refutes them all."""
    trained: dict[str, TrialSpec] = {}
    ran_out: dict[tuple[Outcome, str], TrialSpec] = {}
    for result in results:
        spec = specs.get(result.key)
        if spec is None:
            continue
        if result.is_ok:
            trained[spec.key] = spec
        elif result.outcome in _GROWS and result.is_result:
            ran_out[result.outcome, spec.key] = spec
    ooms: dict[Kind, list[TrialSpec]] = {}
    for (outcome, _), spec in ran_out.items():
        # Only those that no other needs less than: thousands come to a handful.
        least = ooms.setdefault(_kind(outcome, spec), [])
        if not any(_needs_more(outcome, each, spec) for each in least):
            least[:] = [each for each in least if not _needs_more(outcome, spec, each)]
            least.append(spec)
    found = Dominance(ooms, share, seed)
    if ooms and any(found._below(spec) for spec in trained.values()):
        return Dominance({}, share, seed)
    return found


def _kind(outcome: Outcome, spec: TrialSpec) -> Kind:
    free = {*_GROWS[outcome], _ROOM.get(outcome), *_NO_MATTER}
    return outcome, frozenset(each for each in spec.settings.items() if each[0] not in free)


def _needs_more(outcome: Outcome, least: TrialSpec, spec: TrialSpec) -> bool:
    """Whether a trial needs at least as much, and has at most as much room, as one that failed."""
    if spec.key == least.key:
        return False
    room = _ROOM.get(outcome)
    if room and not _at_least(least.get(room), spec.get(room), unset=math.inf):
        return False
    return all(
        least.get(name) == spec.get(name) or _at_least(spec.get(name), least.get(name))
        for name in _GROWS[outcome]
    )


def _at_least(value: Level, other: Level, unset: float | None = None) -> bool:
    value, other = (unset if each is None else each for each in (value, other))
    is_number = isinstance(value, int | float) and isinstance(other, int | float)
    return is_number and value >= other  # type: ignore[operator]
