"""The shared memory file system, where loader workers pass their batches."""

from __future__ import annotations

import os

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors.contract import Sensor, why


class ShmSensor(Sensor):
    """How full /dev/shm is. In a container it is often only 64 MiB."""

    name = "shm"
    scope: Scope = "host"
    metrics = ("shm_used", "shm_size")

    def __init__(self, path: str = "/dev/shm") -> None:
        super().__init__()
        self.entity = Entity("shm")
        self._path = path

    def read(self) -> list[Reading]:
        try:
            found = os.statvfs(self._path)
        except OSError as error:
            self.lacks(why(error), hint="mount a tmpfs there; for a container: --shm-size 8g")
            return []
        used = float((found.f_blocks - found.f_bfree) * found.f_frsize)
        size = float(found.f_blocks * found.f_frsize)
        if size:
            return [Reading(self.entity, {"shm_used": used, "shm_size": size})]
        # A tmpfs mounted with size=0 has no bound of its own and counts no blocks.
        self.lacks(f"{self._path} is mounted without a size")
        return []
