"""What PyTorch's caching allocator holds on CUDA devices. Standard library only, never raises."""

import sys
import time

events = sys.modules["_stepscope_events"]

_now = time.monotonic_ns


class Allocator:
    """What PyTorch's caching allocator holds on CUDA devices, told at the ends of steps and epochs.

    It is asked for its books only: nothing is waited for on a device, and none is initialised.
    """

    EVERY_NS = 100_000_000
    TIMES_COST = 1000  # how long to leave it alone: a thousandth of the time at most

    def __init__(self):
        self.due = 0
        self._uuids = {}

    def tell(self, writer):
        started = _now()
        try:
            cuda = getattr(sys.modules.get("torch"), "cuda", None)
            if cuda is not None and cuda.is_initialized():
                for device in range(cuda.device_count()):
                    self._tell_device(writer, cuda, device)
        except Exception:
            pass
        self.due = started + max(self.EVERY_NS, self.TIMES_COST * (_now() - started))

    def tell_last(self):
        """When the process ends: the peaks it came to, and whether it ran out of memory."""
        writer = events.current
        if writer is None:
            return
        self.tell(writer)
        writer.gpus_given_back()
        error = getattr(sys, "last_value", None)  # what nobody caught
        if type(error).__name__ == "OutOfMemoryError":
            writer.write_named(events.GPU_OOM, str(error))

    def _tell_device(self, writer, cuda, device):
        stats = cuda.memory.memory_stats_as_nested_dict(device)
        reserved = stats["reserved_bytes"]["all"]
        if not reserved["peak"]:
            return
        allocated = stats["allocated_bytes"]["all"]
        writer.gpu_memory(
            device,
            self._uuid_of(cuda, device),
            (allocated["current"], reserved["current"]),
            (allocated["peak"], reserved["peak"]),
            (stats["num_alloc_retries"], stats["num_ooms"]),
        )

    def _uuid_of(self, cuda, device):
        """As NVML writes it; old versions of PyTorch do not know it."""
        if device not in self._uuids:
            uuid = str(getattr(cuda.get_device_properties(device), "uuid", ""))
            self._uuids[device] = ("GPU-" + uuid) if uuid else "cuda:%d" % device
        return self._uuids[device]
