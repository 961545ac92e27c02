"""Network traffic, which the kernel counts per namespace and interface, not per process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors import procfs
from stepscope.sensors.contract import Sensor


@dataclass
class _Totals:
    """What a namespace has moved. Interfaces come and go, so their differences are added up."""

    last: procfs.Traffic = field(default_factory=dict)
    received: int = 0
    sent: int = 0
    loopback: int = 0

    def add(self, now: procfs.Traffic) -> None:
        for interface, (received, sent) in now.items():
            before_received, before_sent = self.last.get(interface, (0, 0))
            if interface == "lo":
                self.loopback += _grown(before_received, received)
            else:
                self.received += _grown(before_received, received)
                self.sent += _grown(before_sent, sent)
        self.last = now

    def values(self) -> dict[str, float | None]:
        return {
            "net_received": float(self.received),
            "net_sent": float(self.sent),
            "loopback": float(self.loopback),
        }


def _grown(before: int, now: int) -> int:
    """By how much a counter has grown; one that fell was started anew."""
    return now - before if now >= before else now


class NetworkSensor(Sensor):
    """Bytes received and sent in each network namespace that the watched processes live in.

    `namespaces` gives, for the inode of each namespace, a living process in it. All traffic of a
    namespace is counted, that of strangers too; in a bridge's namespace a packet is counted once
    for each interface it passes.
    """

    name = "network"
    scope: Scope = "host"
    metrics = ("net_received", "net_sent", "loopback")

    def __init__(self, namespaces: Callable[[], dict[int, int]], proc: str = procfs.PROC) -> None:
        super().__init__()
        self._namespaces = namespaces
        self._proc = proc
        self._totals: dict[int, _Totals] = {}

    def read(self) -> list[Reading]:
        readings = []
        reason: str | OSError = "no watched process is in a network namespace that can be read"
        for inode, pid in self._namespaces().items():
            try:
                # Opened anew each time: a kept descriptor would keep the namespace alive.
                data = procfs.read_all(f"{self._proc}/{pid}/net/dev")
            except OSError as error:
                reason = error
                continue
            if traffic := procfs.parse_interfaces(data):
                totals = self._totals.setdefault(inode, _Totals())
                totals.add(traffic)
                readings.append(Reading(Entity(f"net:{inode}"), totals.values()))
        if readings:
            self.missing.clear()
        else:
            self.lacks(reason, hint="/proc/PID/net/dev must be readable")
        return readings
