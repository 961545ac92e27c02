"""The only module that uses NVML, NVIDIA's management library.

Every call returns plain numbers in our units or raises `Unreadable` with a readable reason. The
meaning of the values on real hardware is in `docs/metrics.md`, the cost of each sensor in
`docs/overhead.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from stepscope.records import Gpu

_MIB = float(1 << 20)
_NOT_AVAILABLE = (1 << 64) - 1

_INSTALL_PACKAGE = "Run: pip install nvidia-ml-py"
_LOST_HINT = "Check dmesg for Xid messages; rebooting may help"

# fmt: off
_REASONS: dict[int, tuple[str, str]] = {
    2: ("the driver does not support this query", ""),
    3: ("not supported by this GPU", ""),
    4: ("no permission: restricted by the administrator",
        "Run stepscope as the owner of the processes or with sudo"),
    6: ("not found", ""),
    8: ("a power cable is not connected", ""),
    9: ("the NVIDIA driver is not loaded", "Load it with modprobe nvidia, or reboot"),
    10: ("the driver timed out", ""),
    12: ("no NVIDIA driver is installed (libnvidia-ml.so.1 not found)",
         "If there is an NVIDIA GPU, install its driver; a container needs --gpus all"),
    13: ("not supported by this driver version", "Update the NVIDIA driver"),
    15: ("the GPU has fallen off the bus", _LOST_HINT),
    16: ("the GPU must be reset before it can be used again", _LOST_HINT),
    17: ("the operating system has blocked the GPU", ""),
    18: ("the driver was updated: library and kernel module have different versions until a reboot",
         "Reboot the machine or reload the driver"),
    28: ("the GPU is no longer available", _LOST_HINT),
}
# fmt: on
"""Common NVML return codes with a reason and a hint."""

_LOST = frozenset((1, 15, 16, 17, 28))
_PERMANENT = frozenset((2, 3, 4, 13))

_THROTTLED_BY_POWER = 0x04 | 0x80
_THROTTLED_BY_HEAT = 0x20 | 0x40
_THROTTLED_BY_OTHER = 0x02 | 0x10 | 0x200 | 0x400
_THROTTLED_BY_HARDWARE = 0x08
"""Bits of NVML's clock event reasons: software power cap and power brake; software and hardware
thermal slowdown; clock settings, sync boost, board limit and reliability. The hardware bit is also
set with a power brake or a thermal slowdown."""


class NvmlUnavailable(Exception):
    """NVML is not available. The text is the reason."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class Unreadable(Exception):
    """A value cannot be read. `lost`: the GPU is gone. `permanent`: retrying is useless."""

    def __init__(
        self, reason: str, *, lost: bool = False, permanent: bool = False, hint: str = ""
    ) -> None:
        super().__init__(reason)
        self.hint = hint
        self.lost = lost
        self.permanent = permanent


@dataclass(frozen=True)
class PcieCount:
    """Bytes over PCIe from the counters of the device, which wrap around at `wraps_at`."""

    received: int
    sent: int
    wraps_at: int | None


@dataclass(frozen=True)
class ProcessSample:
    """The fraction of a short interval in which kernels of a process ran, and its end."""

    pid: int
    at_us: int
    """Microseconds since the epoch."""
    share: float


class _UnknownName(Unreadable, AttributeError):
    """The installed package is too old."""

    def __init__(self) -> None:
        reason = "not supported by the installed version of nvidia-ml-py"
        super().__init__(reason, permanent=True, hint=_INSTALL_PACKAGE)


class _Library:
    """The package. A missing name makes one metric unreadable instead of failing all."""

    def __init__(self, module: ModuleType | Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self._module, name)
        except AttributeError:
            raise _UnknownName from None
        setattr(self, name, value)
        return value


class Nvml:
    """The initialized library with its GPUs; shut down by `close` or a `with` statement."""

    def __init__(self, module: ModuleType | Any) -> None:
        self._lib = library = _Library(module)
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise NvmlUnavailable(*_reason(error)) from None
        try:
            self.driver = _text(library.nvmlSystemGetDriverVersion())
            self.gpus = list(self._find_gpus())
        except library.NVMLError as error:
            self.close()
            raise NvmlUnavailable(*_reason(error)) from None

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(self._lib.NVMLError):
            self._lib.nvmlShutdown()

    def _find_gpus(self) -> Iterator[NvmlGpu]:
        """Yield the GPUs, each followed by its MIG slices; skip those that cannot be opened."""
        for index in range(self._lib.nvmlDeviceGetCount()):
            try:
                handle = self._lib.nvmlDeviceGetHandleByIndex(index)
                gpu = NvmlGpu(self._lib, handle, self._facts(handle, index))
            except (self._lib.NVMLError, Unreadable):
                continue
            yield gpu
            yield from self._slices(handle, gpu.facts)

    def _slices(self, handle: Any, of: Gpu) -> Iterator[NvmlGpu]:
        lib = self._lib
        try:
            if lib.nvmlDeviceGetMigMode(handle)[0] != 1:
                return
            count = lib.nvmlDeviceGetMaxMigDeviceCount(handle)
        except (lib.NVMLError, Unreadable):
            return
        for place in range(count):
            try:
                part = lib.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                facts = self._facts(part, of.index, f"{of.label} slice {place}", of.uuid)
                yield NvmlGpu(lib, part, facts, (handle, lib.nvmlDeviceGetGpuInstanceId(part)))
            except (lib.NVMLError, Unreadable):
                continue

    def _facts(
        self, handle: Any, index: int | None, label: str = "", mig_of: str | None = None
    ) -> Gpu:
        lib = self._lib

        def optional(query: Callable[[], Any]) -> Any:
            try:
                return query()
            except (lib.NVMLError, Unreadable):
                return None

        memory = optional(lambda: lib.nvmlDeviceGetMemoryInfo(handle).total)
        limit = optional(lambda: lib.nvmlDeviceGetEnforcedPowerLimit(handle))
        bus = optional(lambda: lib.nvmlDeviceGetPciInfo(handle).busId)
        return Gpu(
            index=index,
            uuid=_text(lib.nvmlDeviceGetUUID(handle)),
            model=_text(optional(lambda: lib.nvmlDeviceGetName(handle)) or "unknown"),
            label=label or f"GPU {index}",
            bus=None if bus is None else _text(bus),
            memory_bytes=None if memory is None else float(memory),
            power_limit_watts=None if limit is None else limit / 1e3,
            pcie_generation=optional(lambda: lib.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            pcie_width=optional(lambda: lib.nvmlDeviceGetMaxPcieLinkWidth(handle)),
            mig_of=mig_of,
        )


class NvmlGpu:
    """A GPU or MIG slice. Each method is one query to the driver."""

    def __init__(
        self, library: Any, handle: Any, facts: Gpu, slice_of: tuple[Any, int] | None = None
    ) -> None:
        self.facts = facts
        self._lib = library
        self._handle = handle
        self._slice_of = slice_of
        self._has_instant_power = hasattr(library, "NVML_FI_DEV_POWER_INSTANT")

    def utilization(self) -> tuple[float, float]:
        """Return the fractions of time that a kernel or copy ran, and that memory was accessed."""
        rates = self._query(self._lib.nvmlDeviceGetUtilizationRates)
        return rates.gpu / 100, rates.memory / 100

    def memory_used(self) -> float:
        """Return the device memory in use by all processes, in bytes."""
        return float(self._query(self._lib.nvmlDeviceGetMemoryInfo).used)

    def processes(self) -> list[tuple[int, float | None]]:
        """Return pid (the host's, in a container) and bytes of processes with a context."""
        listed = self._query(self._lib.nvmlDeviceGetComputeRunningProcesses)
        # NVML represents "not available" as the largest number.
        return [
            (p.pid, None if p.usedGpuMemory in (None, _NOT_AVAILABLE) else float(p.usedGpuMemory))
            for p in listed
        ]

    def process_samples(self, after_us: int) -> list[ProcessSample]:
        """Return the driver's samples of each process after a time; empty if no process ran."""
        lib = self._lib
        try:
            samples = lib.nvmlDeviceGetProcessUtilization(self._handle, after_us)
        except lib.NVMLError as error:
            if error.value in (lib.NVML_SUCCESS, lib.NVML_ERROR_NOT_FOUND):  # both: no samples
                return []
            raise unreadable(error.value, f"NVML: {error}") from None
        return [
            ProcessSample(s.pid, s.timeStamp, min(s.smUtil, 100) / 100)
            for s in samples
            if s.timeStamp > after_us  # the driver leaves some entries of its list unset
        ]

    def power(self) -> float:
        """Return the current power in watts, or its mean over the last second."""
        if self._has_instant_power:
            try:
                (field,) = self._fields(self._lib.NVML_FI_DEV_POWER_INSTANT)
                return float(field.value.uiVal) / 1e3
            except Unreadable as error:
                if not error.permanent:
                    raise
                self._has_instant_power = False
        return float(self._query(self._lib.nvmlDeviceGetPowerUsage)) / 1e3

    def energy(self) -> float:
        """Return the energy since the driver was loaded, in joules."""
        return float(self._query(self._lib.nvmlDeviceGetTotalEnergyConsumption)) / 1e3

    def temperature(self) -> float:
        return float(
            self._query(self._lib.nvmlDeviceGetTemperature, self._lib.NVML_TEMPERATURE_GPU)
        )

    def clocks(self) -> tuple[float, float]:
        """Return the clocks of the multiprocessors and of the memory in MHz."""
        lib = self._lib
        return (
            float(self._query(lib.nvmlDeviceGetClockInfo, lib.NVML_CLOCK_SM)),
            float(self._query(lib.nvmlDeviceGetClockInfo, lib.NVML_CLOCK_MEM)),
        )

    def throttled_by(self) -> tuple[bool, bool, bool]:
        """Return whether the clocks are reduced by power, by heat, by anything else."""
        query = getattr(self._lib, "nvmlDeviceGetCurrentClocksEventReasons", None)
        bits = self._query(query or self._lib.nvmlDeviceGetCurrentClocksThrottleReasons)
        power, heat = bool(bits & _THROTTLED_BY_POWER), bool(bits & _THROTTLED_BY_HEAT)
        hardware = bool(bits & _THROTTLED_BY_HARDWARE) and not (power or heat)
        return power, heat, hardware or bool(bits & _THROTTLED_BY_OTHER)

    def ecc_errors(self) -> tuple[float, float]:
        """Return corrected and uncorrected memory errors since the driver was loaded."""
        lib = self._lib
        corrected, uncorrected = (
            float(self._query(lib.nvmlDeviceGetTotalEccErrors, kind, lib.NVML_VOLATILE_ECC))
            for kind in (
                lib.NVML_MEMORY_ERROR_TYPE_CORRECTED,
                lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            )
        )
        return corrected, uncorrected

    def pcie_count(self) -> PcieCount:
        """Return the byte counters of the device, which have 32 bits on many GPUs."""
        lib = self._lib
        received, sent = self._fields(
            lib.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, lib.NVML_FI_DEV_PCIE_COUNT_TX_BYTES
        )
        if received.valueType == lib.NVML_VALUE_TYPE_UNSIGNED_INT:
            return PcieCount(received.value.uiVal, sent.value.uiVal, 1 << 32)
        return PcieCount(received.value.ullVal, sent.value.ullVal, None)

    def pcie_sample(self) -> tuple[float, float]:
        """Return bytes/s to and from the device, each measured over 20 ms (blocking)."""
        lib = self._lib
        received, sent = (
            float(self._query(lib.nvmlDeviceGetPcieThroughput, counter)) * 1e3
            for counter in (lib.NVML_PCIE_UTIL_RX_BYTES, lib.NVML_PCIE_UTIL_TX_BYTES)
        )
        return received, sent

    def performance(self) -> Performance:
        """Return the performance counters (Hopper or later); raises Unreadable on other GPUs."""
        return Performance(self._lib, self._performance_sampler())

    def _performance_sampler(self) -> Callable[[Any], None]:
        lib = self._lib
        whole = self._slice_of[0] if self._slice_of else self._handle
        try:
            supported = lib.nvmlGpmQueryDeviceSupport(whole).isSupportedDevice
        except (lib.NVMLError, AttributeError):
            supported = False
        if not supported:
            reason = "performance counters (GPM) require a Hopper or later GPU"
            hint = "Use a newer GPU for these metrics; PCIe traffic is sampled instead"
            raise Unreadable(reason, permanent=True, hint=hint)
        if self._slice_of:
            instance = self._slice_of[1]
            return lambda sample: lib.nvmlGpmMigSampleGet(whole, instance, sample)
        return lambda sample: lib.nvmlGpmSampleGet(whole, sample)

    def _fields(self, *ids: int) -> list[Any]:
        values = list(self._query(self._lib.nvmlDeviceGetFieldValues, list(ids)))
        for value in values:
            if value.nvmlReturn:
                raise unreadable(value.nvmlReturn)
        return values

    def _query(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(self._handle, *arguments)
        except self._lib.NVMLError as error:
            raise unreadable(error.value, f"NVML: {error}") from None


class Performance:
    """GPM: activity of the GPU units between two samples of the counters, without gaps."""

    MIN_INTERVAL_S = 0.2
    """The driver reads the counters about ten times a second, on its own schedule. Samples closer
    than this are averages over a longer window than the time between them, and do not add up."""

    METRICS: ClassVar[Mapping[str, tuple[str, float]]] = {
        "gpu_active": ("GRAPHICS_UTIL", 0.01),
        "gpu_sm": ("SM_UTIL", 0.01),
        "gpu_occupancy": ("SM_OCCUPANCY", 0.01),
        "gpu_tensor": ("ANY_TENSOR_UTIL", 0.01),
        "gpu_dram": ("DRAM_BW_UTIL", 0.01),
        "gpu_fp32": ("FP32_UTIL", 0.01),
        "gpu_fp16": ("FP16_UTIL", 0.01),
        "gpu_pcie_received": ("PCIE_RX_PER_SEC", _MIB),
        "gpu_pcie_sent": ("PCIE_TX_PER_SEC", _MIB),
        "gpu_nvlink_received": ("NVLINK_TOTAL_RX_PER_SEC", _MIB),
        "gpu_nvlink_sent": ("NVLINK_TOTAL_TX_PER_SEC", _MIB),
    }
    """Our metric to NVML's metric and the factor to our unit."""

    def __init__(self, library: Any, take: Callable[[Any], None]) -> None:
        self._lib = library
        self._take = take
        self._request = library.c_nvmlGpmMetricsGet_t()
        self._request.version = library.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(self.METRICS)
        self._slots: list[tuple[str, Any, float]] = []
        for place, (metric, (name, unit)) in enumerate(self.METRICS.items()):
            slot = self._request.metrics[place]
            slot.metricId = getattr(library, f"NVML_GPM_METRIC_{name}")
            self._slots.append((metric, slot, unit))
        allocate = library.nvmlGpmSampleAlloc
        self._before, self._now = self._guarded(allocate), self._guarded(allocate)

    def sample(self) -> None:
        """Read the counters; `rates` compares them with the kept sample."""
        self._guarded(self._take, self._now)

    def keep(self) -> None:
        """Keep the last sample as the start of the next interval."""
        self._before, self._now = self._now, self._before

    def rates(self) -> dict[str, float | Unreadable]:
        """Return mean fractions and bytes/s between the kept and the last sample."""
        self._request.sample1, self._request.sample2 = self._before, self._now
        self._guarded(self._lib.nvmlGpmMetricsGet, self._request)
        return {
            metric: unreadable(slot.nvmlReturn) if slot.nvmlReturn else slot.value * unit
            for metric, slot, unit in self._slots
        }

    def close(self) -> None:
        for sample in (self._before, self._now):
            with contextlib.suppress(self._lib.NVMLError):
                self._lib.nvmlGpmSampleFree(sample)

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._lib.NVMLError as error:
            raise unreadable(error.value, f"NVML: {error}") from None


def open_nvml() -> Nvml:
    """Initialize NVML; raises NvmlUnavailable with the reason."""
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailable(
            "the nvidia-ml-py package is not installed", _INSTALL_PACKAGE
        ) from None
    return Nvml(pynvml)


def unreadable(code: int, message: str = "") -> Unreadable:
    """Return the exception for an NVML return code."""
    reason, hint = _REASONS.get(code, (message or f"NVML error {code}", ""))
    return Unreadable(reason, lost=code in _LOST, permanent=code in _PERMANENT, hint=hint)


def _reason(error: Any) -> tuple[str, str]:
    return _REASONS.get(error.value, (f"NVML: {error}", ""))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
