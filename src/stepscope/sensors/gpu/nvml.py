"""NVIDIA's management library: the only module that knows it.

Every call gives plain numbers in our units, or raises `Unreadable` with a reason in words. What a
call costs and what its value means on real hardware is in `docs/measurement.md`.
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

_INSTALL_PACKAGE = "pip install nvidia-ml-py"
_AFTER_A_LOSS = "look into dmesg for Xid messages; a restart may bring it back"

# fmt: off
_REASONS: dict[int, tuple[str, str]] = {
    2: ("the driver does not know this question", ""),
    3: ("this GPU does not support it", ""),
    4: ("no permission: the administrator has restricted it",
        "run stepscope as the user of the processes, or with sudo"),
    6: ("not found", ""),
    8: ("a power cable is not connected", ""),
    9: ("the NVIDIA driver is not loaded", "load it: modprobe nvidia; or restart"),
    10: ("the driver did not answer in time", ""),
    12: ("no NVIDIA driver is installed (libnvidia-ml.so.1 is not there)",
         "with an NVIDIA GPU: install its driver; a container needs --gpus all"),
    13: ("this driver is too old for it", "a newer NVIDIA driver tells it"),
    15: ("the GPU has fallen off the bus", _AFTER_A_LOSS),
    16: ("the GPU must be reset before it can be used again", _AFTER_A_LOSS),
    17: ("the operating system has blocked the GPU", ""),
    18: ("the driver was updated: its library and its kernel module differ until a restart",
         "restart the machine, or reload the driver"),
    28: ("the GPU is not there any more", _AFTER_A_LOSS),
}
# fmt: on
"""NVML's return codes that users meet, in words, and what helps."""

_LOST = frozenset((1, 15, 16, 17, 28))
_FOR_GOOD = frozenset((2, 3, 4, 13))

_SLOWED_BY_POWER = 0x04 | 0x80
_SLOWED_BY_HEAT = 0x20 | 0x40
_SLOWED_OTHERWISE = 0x02 | 0x10 | 0x200 | 0x400
_SLOWED_BY_HARDWARE = 0x08
"""Bits of NVML's clock event reasons: software cap and power brake; the two thermal slow-downs;
clock settings, sync boost, board limit and reliability. The last comes with a brake or heat."""


class NvmlUnavailable(Exception):
    """The library cannot be used here; the text says why, `hint` what would help."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class Unreadable(Exception):
    """A value cannot be read: `lost` if the whole GPU is gone, `for_good` if it never will be."""

    def __init__(
        self, reason: str, *, lost: bool = False, for_good: bool = False, hint: str = ""
    ) -> None:
        super().__init__(reason)
        self.hint = hint
        self.lost = lost
        self.for_good = for_good


@dataclass(frozen=True)
class PcieCount:
    """Bytes over PCIe by the device's counters, which begin again at `wraps_at`."""

    received: int
    sent: int
    wraps_at: int | None


@dataclass(frozen=True)
class ProcessSample:
    """The share of a short time in which kernels of one process ran; until when it was."""

    pid: int
    at_us: int
    """Microseconds since 1970."""
    share: float


class _UnknownName(Unreadable, AttributeError):
    """The installed package is older than what is asked of it."""

    def __init__(self) -> None:
        reason = "the installed nvidia-ml-py is too old for it"
        super().__init__(reason, for_good=True, hint=_INSTALL_PACKAGE)


class _Library:
    """The package, of which a name that it lacks is one thing less to read, and no end of all."""

    def __init__(self, module: ModuleType | Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        try:
            found = getattr(self._module, name)
        except AttributeError:
            raise _UnknownName from None
        setattr(self, name, found)
        return found


class Nvml:
    """The opened library with its GPUs; `close`, or the end of a `with`, gives it back."""

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
        """The GPUs, each followed by its slices; one that cannot be opened is left out."""
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

        def told(ask: Callable[[], Any]) -> Any:
            try:
                return ask()
            except (lib.NVMLError, Unreadable):
                return None

        memory = told(lambda: lib.nvmlDeviceGetMemoryInfo(handle).total)
        limit = told(lambda: lib.nvmlDeviceGetEnforcedPowerLimit(handle))
        bus = told(lambda: lib.nvmlDeviceGetPciInfo(handle).busId)
        return Gpu(
            index=index,
            uuid=_text(lib.nvmlDeviceGetUUID(handle)),
            model=_text(told(lambda: lib.nvmlDeviceGetName(handle)) or "unknown"),
            label=label or f"GPU {index}",
            bus=None if bus is None else _text(bus),
            memory_bytes=None if memory is None else float(memory),
            power_limit_watts=None if limit is None else limit / 1e3,
            pcie_generation=told(lambda: lib.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            pcie_width=told(lambda: lib.nvmlDeviceGetMaxPcieLinkWidth(handle)),
            mig_of=mig_of,
        )


class NvmlGpu:
    """One GPU or MIG slice. Each method is one question to the driver."""

    def __init__(
        self, library: Any, handle: Any, facts: Gpu, slice_of: tuple[Any, int] | None = None
    ) -> None:
        self.facts = facts
        self._lib = library
        self._handle = handle
        self._slice_of = slice_of
        self._tells_power_now = hasattr(library, "NVML_FI_DEV_POWER_INSTANT")

    def utilisation(self) -> tuple[float, float]:
        """Shares of the time that anything ran, and that memory was read or written."""
        rates = self._ask(self._lib.nvmlDeviceGetUtilizationRates)
        return rates.gpu / 100, rates.memory / 100

    def memory_used(self) -> float:
        """Bytes in use, by everybody."""
        return float(self._ask(self._lib.nvmlDeviceGetMemoryInfo).used)

    def processes(self) -> list[tuple[int, float | None]]:
        """Those that hold a context: pid (of the host, in a container) and bytes, where told."""
        found = self._ask(self._lib.nvmlDeviceGetComputeRunningProcesses)
        # NVML says "not available" with the largest number there is.
        return [
            (p.pid, None if p.usedGpuMemory in (None, _NOT_AVAILABLE) else float(p.usedGpuMemory))
            for p in found
        ]

    def process_samples(self, after_us: int) -> list[ProcessSample]:
        """What the driver sampled of each process after a time; nothing where none ran."""
        lib = self._lib
        try:
            found = lib.nvmlDeviceGetProcessUtilization(self._handle, after_us)
        except lib.NVMLError as error:
            if error.value in (lib.NVML_SUCCESS, lib.NVML_ERROR_NOT_FOUND):  # both: no samples
                return []
            raise unreadable(error.value, f"NVML: {error}") from None
        return [
            ProcessSample(s.pid, s.timeStamp, min(s.smUtil, 100) / 100)
            for s in found
            if s.timeStamp > after_us  # the driver leaves some places of its list unfilled
        ]

    def power(self) -> float:
        """Watts right now; where only a mean of the last second is told, that."""
        if self._tells_power_now:
            try:
                (field,) = self._fields(self._lib.NVML_FI_DEV_POWER_INSTANT)
                return float(field.value.uiVal) / 1e3
            except Unreadable as error:
                if not error.for_good:
                    raise
                self._tells_power_now = False
        return float(self._ask(self._lib.nvmlDeviceGetPowerUsage)) / 1e3

    def energy(self) -> float:
        """Joules since the driver was loaded."""
        return float(self._ask(self._lib.nvmlDeviceGetTotalEnergyConsumption)) / 1e3

    def temperature(self) -> float:
        return float(self._ask(self._lib.nvmlDeviceGetTemperature, self._lib.NVML_TEMPERATURE_GPU))

    def clocks(self) -> tuple[float, float]:
        """MHz of the multiprocessors and of the memory."""
        lib = self._lib
        return (
            float(self._ask(lib.nvmlDeviceGetClockInfo, lib.NVML_CLOCK_SM)),
            float(self._ask(lib.nvmlDeviceGetClockInfo, lib.NVML_CLOCK_MEM)),
        )

    def slowed_by(self) -> tuple[bool, bool, bool]:
        """Whether the clocks are held down by power, by heat, by anything else."""
        ask = getattr(self._lib, "nvmlDeviceGetCurrentClocksEventReasons", None)
        bits = self._ask(ask or self._lib.nvmlDeviceGetCurrentClocksThrottleReasons)
        power, heat = bool(bits & _SLOWED_BY_POWER), bool(bits & _SLOWED_BY_HEAT)
        hardware = bool(bits & _SLOWED_BY_HARDWARE) and not (power or heat)
        return power, heat, hardware or bool(bits & _SLOWED_OTHERWISE)

    def ecc_errors(self) -> tuple[float, float]:
        """Memory errors since the driver was loaded: corrected, and not."""
        lib = self._lib
        corrected, uncorrected = (
            float(self._ask(lib.nvmlDeviceGetTotalEccErrors, kind, lib.NVML_VOLATILE_ECC))
            for kind in (
                lib.NVML_MEMORY_ERROR_TYPE_CORRECTED,
                lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            )
        )
        return corrected, uncorrected

    def pcie_count(self) -> PcieCount:
        """Bytes by the device's own counters, of 32 bits on many parts."""
        lib = self._lib
        received, sent = self._fields(
            lib.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, lib.NVML_FI_DEV_PCIE_COUNT_TX_BYTES
        )
        if received.valueType == lib.NVML_VALUE_TYPE_UNSIGNED_INT:
            return PcieCount(received.value.uiVal, sent.value.uiVal, 1 << 32)
        return PcieCount(received.value.ullVal, sent.value.ullVal, None)

    def pcie_look(self) -> tuple[float, float]:
        """Bytes/s to and from the device in two windows of 20 ms. Blocks as long as that."""
        lib = self._lib
        received, sent = (
            float(self._ask(lib.nvmlDeviceGetPcieThroughput, counter)) * 1e3
            for counter in (lib.NVML_PCIE_UTIL_RX_BYTES, lib.NVML_PCIE_UTIL_TX_BYTES)
        )
        return received, sent

    def performance(self) -> Performance:
        """What the units of the device do, on Hopper and later; Unreadable elsewhere."""
        return Performance(self._lib, self._sampler_of_performance())

    def _sampler_of_performance(self) -> Callable[[Any], None]:
        lib = self._lib
        whole = self._slice_of[0] if self._slice_of else self._handle
        try:
            supported = lib.nvmlGpmQueryDeviceSupport(whole).isSupportedDevice
        except (lib.NVMLError, AttributeError):
            supported = False
        if not supported:
            reason = "performance counters (GPM) need a Hopper GPU or a later one"
            hint = "only newer GPUs tell it; PCIe traffic is sampled instead"
            raise Unreadable(reason, for_good=True, hint=hint)
        if self._slice_of:
            instance = self._slice_of[1]
            return lambda sample: lib.nvmlGpmMigSampleGet(whole, instance, sample)
        return lambda sample: lib.nvmlGpmSampleGet(whole, sample)

    def _fields(self, *ids: int) -> list[Any]:
        values = list(self._ask(self._lib.nvmlDeviceGetFieldValues, list(ids)))
        for value in values:
            if value.nvmlReturn:
                raise unreadable(value.nvmlReturn)
        return values

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(self._handle, *arguments)
        except self._lib.NVMLError as error:
            raise unreadable(error.value, f"NVML: {error}") from None


class Performance:
    """GPM: what the device's units did between two samples of its counters, without a gap."""

    SHORTEST_S = 0.2
    """The driver takes the counters about ten times a second, at times of its own. Samples closer
    than this are means over a longer window than the one between them, and do not add up."""

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
    """Ours to NVML's, with the size of its unit in ours."""

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
        """Read the counters, cheaply; `rates` compares them with those that were kept."""
        self._guarded(self._take, self._now)

    def keep(self) -> None:
        """Let the last sample be what the next is compared with."""
        self._before, self._now = self._now, self._before

    def rates(self) -> dict[str, float | Unreadable]:
        """Mean shares and bytes/s between the kept sample and the last one."""
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

    def _guarded(self, act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except self._lib.NVMLError as error:
            raise unreadable(error.value, f"NVML: {error}") from None


def open_nvml() -> Nvml:
    """Open the library of this machine, or say why there is none."""
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailable(
            "the package nvidia-ml-py is not installed", _INSTALL_PACKAGE
        ) from None
    return Nvml(pynvml)


def unreadable(code: int, words: str = "") -> Unreadable:
    """A return code of NVML as the reason why a value is missing."""
    reason, hint = _REASONS.get(code, (words or f"NVML said error {code}", ""))
    return Unreadable(reason, lost=code in _LOST, for_good=code in _FOR_GOOD, hint=hint)


def _reason(error: Any) -> tuple[str, str]:
    return _REASONS.get(error.value, (f"NVML: {error}", ""))


def _text(told: Any) -> str:
    return told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told)
