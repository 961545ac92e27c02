"""Report the memory of PyTorch's caching allocator. Standard library only, never raises."""

import sys
import time

events = sys.modules["_stepscope_events"]

_now = time.monotonic_ns


class Allocator:
    """Reports the memory of PyTorch's caching allocator on CUDA devices after steps and epochs.

    It only reads the statistics of the allocator: no device is synchronized or initialized.
    """

    MIN_INTERVAL_NS = 100_000_000
    COST_FACTOR = 1000  # interval as a multiple of the cost: at most a thousandth of the time

    def __init__(self):
        self.due = 0
        self._uuids = {}

    def report(self, writer):
        started = _now()
        try:
            cuda = getattr(sys.modules.get("torch"), "cuda", None)
            if cuda is not None and cuda.is_initialized():
                for device in range(cuda.device_count()):
                    self._report_device(writer, cuda, device)
        except Exception:
            pass
        self.due = started + max(self.MIN_INTERVAL_NS, self.COST_FACTOR * (_now() - started))

    def report_at_exit(self):
        """Report the peaks, and whether the process ran out of GPU memory."""
        writer = events.current
        if writer is None:
            return
        self.report(writer)
        writer.release_gpus()
        error = getattr(sys, "last_value", None)  # the uncaught exception
        if type(error).__name__ == "OutOfMemoryError":
            writer.write_named(events.GPU_OOM, str(error))

    def _report_device(self, writer, cuda, device):
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
        """Return the UUID in the format of NVML, or "cuda:N" with old versions of PyTorch."""
        if device not in self._uuids:
            uuid = str(getattr(cuda.get_device_properties(device), "uuid", ""))
            self._uuids[device] = ("GPU-" + uuid) if uuid else "cuda:%d" % device
        return self._uuids[device]
