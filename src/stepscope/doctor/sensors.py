"""Each sensor as it was in a run: whether it works, why not and what would help, what it costs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stepscope.metrics import BY_KEY
from stepscope.sensors.contract import Sensor

State = Literal["works", "in part", "missing"]

_NO_NEWS = "no limit is set"
"""Missing, and all is well."""

_HINTS: tuple[tuple[str, str], ...] = (
    (r"pressure stall", "boot with psi=1, on a kernel with CONFIG_PSI"),
    (r"nvidia-ml-py|pynvml", "pip install nvidia-ml-py"),
    (r"libnvidia-ml|no NVIDIA driver",
     "with an NVIDIA GPU: install its driver; a container needs --gpus all"),
    (r"driver is not loaded", "load it: modprobe nvidia; or restart"),
    (r"GPM|Hopper",
     "only newer GPUs tell it; PCIe traffic is sampled instead"),
    (r"driver was updated", "restart the machine, or reload the driver"),
    (r"fallen off the bus|must be reset|not there any more",
     "look into dmesg for Xid messages; a restart may bring it back"),
    (r"too old", "a newer NVIDIA driver tells it"),
    (r"[Nn]o permission|[Pp]ermission denied|[Oo]peration not permitted",
     "run stepscope as the user of the processes, or with sudo"),
    (r"root cgroup|not enabled",
     "only a cgroup of its own is counted: systemd-run --scope --user COMMAND"),
    (r"cgroup file system", "mount it: -v /sys/fs/cgroup:/sys/fs/cgroup:ro for a container"),
    (r"cgroup with the", "enable that controller for the cgroup"),
    (r"/dev/shm", "mount a tmpfs there; for a container: --shm-size 8g"),
    (r"network namespace", "/proc/PID/net/dev must be readable"),
)  # fmt: skip
"""Part of a reason to what would make it work."""


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


def sensor_states(facts: Mapping[str, Any], recorded: Collection[str]) -> list[SensorState]:
    """Every sensor there is, from the facts of a run and the metrics that it recorded."""
    sensors = facts.get("sensors") or {}
    missing: Mapping[str, str] = sensors.get("missing") or {}
    estimated: Mapping[str, str] = sensors.get("estimated") or {}
    costs: Mapping[str, Mapping[str, float]] = sensors.get("costs") or {}
    known = sensor_metrics()
    unused = [n for n, metrics in known.items() if n not in costs and missing.keys() & {*metrics}]
    return [
        _state(name, known[name], missing, estimated, costs.get(name), recorded)
        for name in (*(name for name in costs if name in known), *unused)
    ]


def _state(
    name: str,
    metrics: tuple[str, ...],
    missing: Mapping[str, str],
    estimated: Mapping[str, str],
    cost: Mapping[str, float] | None,
    recorded: Collection[str],
) -> SensorState:
    lost = {
        metric: missing[metric]
        for metric in metrics
        if metric in missing and metric not in recorded and missing[metric] != _NO_NEWS
    }
    state: State = "missing" if len(lost) == len(metrics) else "in part" if lost else "works"
    return SensorState(
        name,
        state,
        lost,
        tuple(dict.fromkeys(hint for reason in lost.values() if (hint := hint_for(reason)))),
        {metric: estimated[metric] for metric in metrics if metric in estimated},
        cost["cpu_s"] if cost else None,
        max(cost["period_s"], cost["slowed_to_s"]) if cost else None,
    )


def hint_for(reason: str) -> str | None:
    """What would make it work."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, reason)), None)


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
