"""Each sensor as it was in a run: whether it works, why not and what would help, what it costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stepscope.metrics import BY_KEY
from stepscope.records.facts import SensorFacts
from stepscope.sensors.contract import Sensor

State = Literal["works", "in part", "missing"]


@dataclass(frozen=True)
class SensorState:
    """One line of the table of sensors."""

    name: str
    state: State
    missing: Mapping[str, str]
    """Metric to the reason, where that is a loss."""
    hints: tuple[str, ...]
    estimated: Mapping[str, str]
    cost_s: float | None
    """CPU seconds per reading."""
    period_s: float | None
    """How often it was read, slowed down or not."""

    @property
    def share(self) -> float | None:
        """Of one core."""
        return self.cost_s / self.period_s if self.cost_s is not None and self.period_s else None


def sensor_states(facts: SensorFacts, recorded: Collection[str]) -> list[SensorState]:
    """Every sensor there is, from the facts of a run and the metrics that it recorded."""
    known = sensor_metrics()
    read = [name for name in facts.costs if name in known]
    unread = [n for n in known if n not in facts.costs and facts.missing.keys() & {*known[n]}]
    states = []
    for name in read + unread:
        metrics, cost = known[name], facts.costs.get(name)
        lost = {
            metric: facts.missing[metric]
            for metric in metrics
            if metric in facts.missing and metric not in {*recorded, *facts.unset}
        }
        state: State = "missing" if len(lost) == len(metrics) else "in part" if lost else "works"
        hints = dict.fromkeys(facts.hints[metric] for metric in lost if metric in facts.hints)
        estimated = {m: facts.estimated[m] for m in metrics if m in facts.estimated}
        period_s = max(cost.period_s, cost.slowed_to_s) if cost else None
        cost_s = cost.cpu_s if cost else None
        states.append(SensorState(name, state, lost, tuple(hints), estimated, cost_s, period_s))
    return states


def labels(metrics: Iterable[str]) -> str:
    """Metrics as people call them."""
    return ", ".join(BY_KEY[metric].label if metric in BY_KEY else metric for metric in metrics)


def sensor_metrics() -> dict[str, tuple[str, ...]]:
    """The sensors there are, with what each reads."""
    import stepscope.capture.session  # noqa: F401  (whoever watches has them all)

    return {sensor.name: sensor.metrics for sensor in _all_below(Sensor) if hasattr(sensor, "name")}


def _all_below(base: type[Any]) -> Iterator[type[Any]]:
    for child in base.__subclasses__():
        yield child
        yield from _all_below(child)
