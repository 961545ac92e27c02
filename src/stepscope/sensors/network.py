"""Network traffic; the kernel counts it per namespace and interface, not per process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors import procfs
from stepscope.sensors.contract import Sensor


@dataclass
class _Totals:
    """Traffic of a namespace. Interfaces appear and disappear, so differences are summed."""

    last: procfs.Traffic = field(default_factory=dict)
    received: int = 0
    sent: int = 0
    loopback: int = 0

    def add(self, now: procfs.Traffic) -> None:
        for interface, (received, sent) in now.items():
            before_received, before_sent = self.last.get(interface, (0, 0))
            if interface == "lo":
                self.loopback += _increase(before_received, received)
            else:
                self.received += _increase(before_received, received)
                self.sent += _increase(before_sent, sent)
        self.last = now

    def values(self) -> dict[str, float | None]:
        return {
            "net_received": float(self.received),
            "net_sent": float(self.sent),
            "loopback": float(self.loopback),
        }


def _increase(before: int, now: int) -> int:
    """Return the increase of a counter; a lower value means that the counter was reset."""
    return now - before if now >= before else now


class NetworkSensor(Sensor):
    """Bytes received and sent in each network namespace of the monitored processes.

    `namespaces` returns the inode of each namespace with a running process in it. All traffic of a
    namespace is counted, including that of other processes; in the namespace of a bridge, a packet
    is counted once per interface.
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
        reason: str | OSError = "no monitored process has a readable network namespace"
        for inode, pid in self._namespaces().items():
            try:
                # Opened every time: an open descriptor would keep the namespace alive.
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
            self.mark_missing(reason, hint="Make /proc/PID/net/dev readable")
        return readings
