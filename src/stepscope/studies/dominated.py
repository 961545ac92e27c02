"""Finds trials to skip because a smaller one already ran out of memory.

A trial is dominated by one that ran out of memory if it differs only in settings that can only need
more memory or leave less of it: a larger batch, more workers, a lower limit. There are exceptions,
because libraries choose other algorithms at other sizes. Therefore a share of the dominated trials
is run nevertheless, and if one of them trains, nothing is skipped any more.
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

_MORE_DATA = ("batch_size", "image_size", "frames", "sequence_length")
_GROWS: dict[Outcome, tuple[str, ...]] = {
    Outcome.GPU_OOM: _MORE_DATA,
    Outcome.HOST_OOM: (*_MORE_DATA, "workers", "prefetch", "ranks", "samples"),
    Outcome.SHM_FULL: (*_MORE_DATA, "workers", "prefetch"),
}
"""Settings that need more of the memory that ran out when they grow."""
_LIMIT: dict[Outcome, str] = {Outcome.GPU_OOM: "gpu_memory", Outcome.HOST_OOM: "memory"}
"""The limit on the memory that ran out."""
_IRRELEVANT = ("timeout", "stall_timeout", "seed", "lr", "momentum", "weight_decay")

Kind = tuple[Outcome, frozenset[tuple[str, Level]]]
"""The outcome, and all settings that two trials must share to be compared."""


@dataclass(frozen=True)
class Dominance:
    """The smallest trials that ran out of memory, which dominate others."""

    ooms: Mapping[Kind, Sequence[TrialSpec]]
    share: float
    seed: int

    def reason(self, spec: TrialSpec) -> str:
        """Return why a trial is skipped; empty if it is not."""
        dominating = self._dominating(spec)
        if dominating is None or self.is_tested(spec):
            return ""
        outcome, least = dominating
        names = sorted({*least.settings, *spec.settings})
        differ = {name: least.get(name) for name in names if least.get(name) != spec.get(name)}
        return f"already failed ({outcome.value}) with {levels_text(differ)}"

    def is_tested(self, spec: TrialSpec) -> bool:
        """Return whether a trial is in the share that is run in any case (deterministic)."""
        drawn = zlib.crc32(f"{self.seed} {spec.key}".encode()) / 2**32
        return drawn < self.share

    def _dominating(self, spec: TrialSpec) -> tuple[Outcome, TrialSpec] | None:
        """Return a smaller trial that ran out of memory."""
        if not self.ooms:
            return None
        for outcome in _GROWS:
            for least in self.ooms.get(_kind(outcome, spec), ()):
                if _needs_more(outcome, least, spec):
                    return outcome, least
        return None


def find_dominance(
    results: Iterable[Result], specs: Mapping[str, TrialSpec], share: float, seed: int
) -> Dominance:
    """Return the dominance in results; it is empty if a dominated trial has trained."""
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
        # Only the smallest are kept: a handful out of thousands.
        least = ooms.setdefault(_kind(outcome, spec), [])
        if not any(_needs_more(outcome, each, spec) for each in least):
            least[:] = [each for each in least if not _needs_more(outcome, spec, each)]
            least.append(spec)
    dominance = Dominance(ooms, share, seed)
    if ooms and any(dominance._dominating(spec) for spec in trained.values()):
        return Dominance({}, share, seed)
    return dominance


def _kind(outcome: Outcome, spec: TrialSpec) -> Kind:
    free = {*_GROWS[outcome], _LIMIT.get(outcome), *_IRRELEVANT}
    return outcome, frozenset(each for each in spec.settings.items() if each[0] not in free)


def _needs_more(outcome: Outcome, least: TrialSpec, spec: TrialSpec) -> bool:
    """Return whether a trial needs at least as much memory as one that ran out of it."""
    if spec.key == least.key:
        return False
    limit = _LIMIT.get(outcome)
    if limit and not _at_least(least.get(limit), spec.get(limit), unset=math.inf):
        return False
    return all(
        least.get(name) == spec.get(name) or _at_least(spec.get(name), least.get(name))
        for name in _GROWS[outcome]
    )


def _at_least(value: Level, other: Level, unset: float | None = None) -> bool:
    value, other = (unset if each is None else each for each in (value, other))
    is_number = isinstance(value, int | float) and isinstance(other, int | float)
    return is_number and value >= other  # type: ignore[operator]
