"""The table of metrics, which sampling, reports and documentation share.

A sensor reads a *counter* as a cumulative total. It is stored as a rate over the time between two
readings, so that core-seconds become cores. A *gauge* is stored as read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]
Scope = Literal["process", "host", "gpu"]

SCOPES: tuple[Scope, ...] = ("process", "host", "gpu")


@dataclass(frozen=True)
class Metric:
    """A measured quantity. `unit` is the unit of the stored value."""

    key: str
    unit: str
    kind: Kind
    scope: Scope
    label: str
    description: str


def _of(scope: Scope) -> Callable[[str, str, Kind, str, str], Metric]:
    return lambda key, unit, kind, label, text: Metric(key, unit, kind, scope, label, text)


_process, _host, _gpu = map(_of, SCOPES)

TABLE: tuple[Metric, ...] = (
    # Entity: a role ("tree", "main", "worker", "rank0", "other") or a single process.
    _process("cpu", "cores", "counter", "CPU",
             "CPU time per second, in cores, including exited children"),
    _process("rss", "bytes", "gauge", "RSS",
             "Resident set size; shared pages count once per process"),
    _process("pss", "bytes", "gauge", "Memory (PSS)",
             "Proportional set size: each shared page is divided among the processes that map it"),
    _process("swap", "bytes", "gauge", "Swap",
             "Swapped-out memory; shared pages are divided as in PSS"),
    _process("processes", "count", "gauge", "Processes", "Number of processes"),
    _process("threads", "count", "gauge", "Threads", "Number of threads"),
    _process("faults_minor", "1/s", "counter", "Minor page faults",
             "Page faults served from memory"),
    _process("faults_major", "1/s", "counter", "Major page faults",
             "Page faults that read from storage"),
    _process("switches_voluntary", "1/s", "counter", "Voluntary context switches",
             "Context switches of threads that block, for example on a lock or on I/O"),
    _process("switches_involuntary", "1/s", "counter", "Involuntary context switches",
             "Context switches of preempted threads; many of them mean more threads than cores"),
    _process("cpu_wait", "cores", "counter", "CPU wait",
             "Time per second that runnable threads wait for a CPU, summed over threads"),
    _process("read", "bytes/s", "counter", "Disk read",
             "Bytes read from storage; page-cache hits are not included"),
    _process("write", "bytes/s", "counter", "Disk write",
             "Bytes written to storage, counted when the page cache accepts them"),
    _process("read_calls", "bytes/s", "counter", "Read (system calls)",
             "Bytes returned by read system calls, including page-cache hits, pipes and sockets"),
    _process("write_calls", "bytes/s", "counter", "Write (system calls)",
             "Bytes passed to write system calls, including tmpfs, pipes and sockets"),
    # Entity: "host".
    _host("host_cpu", "cores", "counter", "Host CPU", "Busy cores of the whole machine"),
    _host("host_iowait", "cores", "counter", "Host I/O wait",
          "Cores that are idle while I/O is pending"),
    _host("host_steal", "cores", "counter", "Host steal",
          "Cores that the hypervisor gives to other virtual machines"),
    _host("host_memory", "bytes", "gauge", "Host memory",
          "Used memory of the whole machine: total minus available"),
    _host("host_available", "bytes", "gauge", "Host memory available",
          "Memory that can be allocated without swapping (MemAvailable)"),
    _host("page_cache", "bytes", "gauge", "Page cache",
          "File contents cached in memory, excluding shared memory"),
    _host("dirty_pages", "bytes", "gauge", "Dirty pages",
          "Page-cache contents that are not yet written to storage"),
    _host("host_swap", "bytes", "gauge", "Host swap", "Swap in use on the whole machine"),
    _host("pressure_cpu", "share", "counter", "CPU pressure",
          "Fraction of time that at least one task waits for a CPU (PSI some)"),
    _host("pressure_memory", "share", "counter", "Memory pressure",
          "Fraction of time that at least one task waits for memory (PSI some)"),
    _host("pressure_memory_full", "share", "counter", "Memory stall",
          "Fraction of time that all non-idle tasks wait for memory (PSI full)"),
    _host("pressure_io", "share", "counter", "I/O pressure",
          "Fraction of time that at least one task waits for I/O (PSI some)"),
    _host("pressure_io_full", "share", "counter", "I/O stall",
          "Fraction of time that all non-idle tasks wait for I/O (PSI full)"),
    # Entity: "cgroup", the cgroup in which the command was started.
    _host("cgroup_cpu", "cores", "counter", "Cgroup CPU",
          "CPU time per second of the whole cgroup, in cores"),
    _host("cgroup_throttled", "seconds/s", "counter", "Cgroup throttling",
          "Time per second that the CPU quota throttles the group, summed over CPUs"),
    _host("cgroup_memory", "bytes", "gauge", "Cgroup memory",
          "Memory charged to the cgroup, including the page cache"),
    _host("cgroup_memory_limit", "bytes", "gauge", "Cgroup memory limit",
          "Lowest memory limit of the cgroup and its ancestors"),
    _host("cgroup_oom_kills", "count", "gauge", "Cgroup OOM kills",
          "Processes that the OOM killer has killed in the cgroup so far"),
    # Entities: "net:<namespace>".
    _host("net_received", "bytes/s", "counter", "Network received",
          "Bytes received on all interfaces except loopback"),
    _host("net_sent", "bytes/s", "counter", "Network sent",
          "Bytes sent on all interfaces except loopback"),
    _host("loopback", "bytes/s", "counter", "Loopback",
          "Bytes sent between processes on this machine"),
    # Entity: "shm".
    _host("shm_used", "bytes", "gauge", "/dev/shm used", "Shared memory in use"),
    _host("shm_size", "bytes", "gauge", "/dev/shm size", "Capacity of /dev/shm"),
    # Entity: "monitor", the overhead of monitoring.
    _host("monitor_cpu", "cores", "counter", "Monitor CPU", "CPU time per second of the monitor"),
    _host("monitor_rss", "bytes", "gauge", "Monitor memory", "Resident set size of the monitor"),
    _host("monitor_late", "seconds", "gauge", "Monitor delay",
          "Longest delay of a sample past its scheduled time"),
    # Entity: the UUID of a GPU or of a MIG slice.
    _gpu("gpu_utilization", "share", "gauge", "GPU utilization",
         "Fraction of time that at least one kernel or copy was running (NVML, averaged over 1/6 "
         "to 1 s); it does not show how much of the GPU was in use"),
    _gpu("gpu_active", "share", "counter", "GPU active",
         "Fraction of time that the compute engine was busy, over the whole window (GPM)"),
    _gpu("gpu_other_processes", "share", "gauge", "GPU used by other processes",
         "Fraction of time that kernels of processes outside the run were running, from the "
         "samples of the driver"),
    _gpu("gpu_sm", "share", "counter", "SM activity",
         "Fraction of time that a streaming multiprocessor had work, averaged over all SMs (GPM)"),
    _gpu("gpu_occupancy", "share", "counter", "SM occupancy",
         "Resident warps divided by the maximum number of warps (GPM)"),
    _gpu("gpu_tensor", "share", "counter", "Tensor core activity",
         "Fraction of time that the tensor cores were busy (GPM)"),
    _gpu("gpu_fp32", "share", "counter", "FP32 activity",
         "Fraction of time that the FP32 units were busy, excluding the tensor cores (GPM)"),
    _gpu("gpu_fp16", "share", "counter", "FP16 activity",
         "Fraction of time that the FP16 units were busy, excluding the tensor cores (GPM)"),
    _gpu("gpu_dram", "share", "counter", "GPU memory bandwidth",
         "Device-memory bandwidth in use, as a fraction of the peak (GPM)"),
    _gpu("gpu_memory_controller", "share", "gauge", "Memory controller utilization",
         "Fraction of time that device memory was being read or written (NVML, averaged over 1/6 "
         "to 1 s)"),
    _gpu("gpu_memory", "bytes", "gauge", "GPU memory",
         "Device memory in use by all processes and by the driver"),
    _gpu("gpu_memory_run", "bytes", "gauge", "GPU memory of the run",
         "Device memory of the monitored processes, including their CUDA contexts"),
    _gpu("gpu_pcie_received", "bytes/s", "counter", "PCIe to GPU",
         "PCIe traffic to the device (Rx), including protocol overhead"),
    _gpu("gpu_pcie_sent", "bytes/s", "counter", "PCIe from GPU",
         "PCIe traffic from the device (Tx), including protocol overhead"),
    _gpu("gpu_nvlink_received", "bytes/s", "counter", "NVLink to GPU",
         "NVLink traffic to the device, over all links"),
    _gpu("gpu_nvlink_sent", "bytes/s", "counter", "NVLink from GPU",
         "NVLink traffic from the device, over all links"),
    _gpu("gpu_power", "W", "gauge", "GPU power", "Power draw at the time of the reading"),
    _gpu("gpu_energy", "W", "counter", "GPU power (energy counter)",
         "Mean power, from the energy counter"),
    _gpu("gpu_temperature", "°C", "gauge", "GPU temperature", "Temperature of the GPU"),
    _gpu("gpu_sm_clock", "MHz", "gauge", "SM clock", "Clock of the streaming multiprocessors"),
    _gpu("gpu_memory_clock", "MHz", "gauge", "Memory clock", "Clock of the device memory"),
    _gpu("gpu_throttled_power", "share", "gauge", "Power throttling",
         "Fraction of readings with clocks reduced by a power limit or a power brake"),
    _gpu("gpu_throttled_thermal", "share", "gauge", "Thermal throttling",
         "Fraction of readings with clocks reduced by temperature"),
    _gpu("gpu_throttled_other", "share", "gauge", "Other throttling",
         "Fraction of readings with clocks reduced by hardware, sync boost or clock settings"),
    _gpu("gpu_ecc_corrected", "count", "gauge", "Corrected ECC errors",
         "Corrected ECC errors since the driver was loaded"),
    _gpu("gpu_ecc_uncorrected", "count", "gauge", "Uncorrectable ECC errors",
         "Uncorrectable ECC errors since the driver was loaded"),
)  # fmt: skip

DERIVED: tuple[Metric, ...] = (
    _process("memory", "bytes", "gauge", "Memory",
             "RSS of every sample, minus the shared memory that it counts more than once"),
    # Read from PyTorch's allocator at the end of a step, summed over the processes on a GPU.
    _gpu("gpu_allocated", "bytes", "gauge", "GPU memory allocated", "Memory occupied by tensors"),
    _gpu("gpu_reserved", "bytes", "gauge", "GPU memory reserved",
         "Memory held by the caching allocator, including free cached blocks"),
    _gpu("gpu_allocated_peak", "bytes", "gauge", "GPU memory allocated, peak",
         "Peak memory occupied by tensors so far, including peaks between two readings"),
    _gpu("gpu_reserved_peak", "bytes", "gauge", "GPU memory reserved, peak",
         "Peak memory held by the caching allocator so far"),
    _gpu("gpu_alloc_retries", "count", "gauge", "GPU allocator retries",
         "Times that the allocator had to free its cache and try again. If not 0, the "
         "batch size is close to the limit"),
    _gpu("gpu_alloc_ooms", "count", "gauge", "GPU out-of-memory errors",
         "Allocations that failed"),
)  # fmt: skip
"""Computed when a run is read; not stored as columns."""

BY_KEY: dict[str, Metric] = {metric.key: metric for metric in TABLE + DERIVED}


def of_scope(scope: Scope) -> tuple[Metric, ...]:
    """Return the metrics that are columns of `<scope>.arrows`."""
    return tuple(metric for metric in TABLE if metric.scope == scope)


def is_counter(key: str) -> bool:
    return BY_KEY[key].kind == "counter"
