"""The one table of metrics: collection, display and docs all read it.

A sensor reads a *counter* as a cumulative total; it is stored as a rate over its true window (so
core-seconds become core-seconds per second, that is cores). A *gauge* is stored as it was read.
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
    """One thing that can be read. `unit` is that of the stored value."""

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
    # Of a role ("tree", "main", "worker", "rank0", "other") or of one process.
    _process("cpu", "cores", "counter", "CPU",
             "core-seconds per second, exited children included"),
    _process("rss", "bytes", "gauge", "RSS",
             "resident memory; pages that processes share are counted once for each of them"),
    _process("pss", "bytes", "gauge", "memory (PSS)",
             "resident memory with each shared page divided among those that share it"),
    _process("swap", "bytes", "gauge", "swap", "memory swapped out, shared pages divided likewise"),
    _process("processes", "count", "gauge", "processes", "living processes"),
    _process("threads", "count", "gauge", "threads", "living threads"),
    _process("faults_minor", "1/s", "counter", "minor faults", "page faults served from memory"),
    _process("faults_major", "1/s", "counter", "major faults", "page faults that read storage"),
    _process("switches_voluntary", "1/s", "counter", "voluntary switches",
             "context switches of threads that waited, for a lock or for data"),
    _process("switches_involuntary", "1/s", "counter", "involuntary switches",
             "context switches of threads that wanted to go on: more threads than cores"),
    _process("cpu_wait", "cores", "counter", "waiting for a CPU",
             "seconds per second that threads could have run and had no CPU, summed over threads"),
    _process("read", "bytes/s", "counter", "disk read",
             "bytes fetched from storage; reads served by the page cache are not in it"),
    _process("write", "bytes/s", "counter", "disk written", "bytes on their way to storage"),
    _process("read_calls", "bytes/s", "counter", "read by calls",
             "bytes asked for by read calls: files, page cache, pipes and sockets alike"),
    _process("write_calls", "bytes/s", "counter", "written by calls",
             "bytes given to write calls: files, tmpfs, pipes and sockets alike"),
    # Of the entity "host".
    _host("host_cpu", "cores", "counter", "host CPU", "cores busy on the whole machine"),
    _host("host_iowait", "cores", "counter", "host I/O wait", "cores idle while I/O was pending"),
    _host("host_steal", "cores", "counter", "host steal", "cores the hypervisor gave to others"),
    _host("host_memory", "bytes", "gauge", "host memory", "used: total less available"),
    _host("host_available", "bytes", "gauge", "host memory available", "without swapping"),
    _host("page_cache", "bytes", "gauge", "page cache", "file pages kept in memory"),
    _host("dirty", "bytes", "gauge", "dirty pages", "written, not yet on storage"),
    _host("host_swap", "bytes", "gauge", "host swap", "swap in use"),
    _host("pressure_cpu", "share", "counter", "CPU pressure", "time some task waited for a CPU"),
    _host("pressure_memory", "share", "counter", "memory pressure",
          "time in which some task waited for memory"),
    _host("pressure_memory_full", "share", "counter", "memory stall",
          "time in which every running task waited for memory"),
    _host("pressure_io", "share", "counter", "I/O pressure", "time some task waited for I/O"),
    _host("pressure_io_full", "share", "counter", "I/O stall",
          "time in which every running task waited for I/O"),
    # Of the entity "cgroup": the group the command was started in.
    _host("cgroup_cpu", "cores", "counter", "cgroup CPU", "cores used by the whole group"),
    _host("cgroup_throttled", "seconds/s", "counter", "cgroup throttled",
          "time the CPU quota held its threads back, summed over CPUs"),
    _host("cgroup_memory", "bytes", "gauge", "cgroup memory",
          "charged to the group, page cache included"),
    _host("cgroup_memory_limit", "bytes", "gauge", "cgroup limit", "the lowest limit that applies"),
    _host("cgroup_oom_kills", "count", "gauge", "cgroup OOM kills", "processes killed so far"),
    # Of the entities "net:<namespace>".
    _host("net_received", "bytes/s", "counter", "network in", "each interface but loopback"),
    _host("net_sent", "bytes/s", "counter", "network out", "each interface but loopback"),
    _host("loopback", "bytes/s", "counter", "loopback", "between processes of this machine"),
    # Of the entity "shm".
    _host("shm_used", "bytes", "gauge", "/dev/shm", "shared memory in use"),
    _host("shm_size", "bytes", "gauge", "/dev/shm size", "its capacity"),
    # Of the entity "watcher": what watching costs.
    _host("watcher_cpu", "cores", "counter", "watcher CPU", "spent by stepscope itself"),
    _host("watcher_rss", "bytes", "gauge", "watcher memory", "resident memory of stepscope itself"),
    _host("watcher_late", "seconds", "gauge", "watcher late", "most that a sample came late"),
    # Of a GPU, or of a MIG slice of one, by its UUID.
    _gpu("gpu_utilization", "share", "gauge", "GPU utilisation",
         "time in which any kernel or copy ran, as NVML averages it over 1/6 to 1 s; it does not "
         "tell whether the GPU was busy with work"),
    _gpu("gpu_active", "share", "counter", "GPU active",
         "time in which the compute engine had anything to do, over the whole window"),
    _gpu("gpu_others", "share", "gauge", "GPU used by others",
         "time in which kernels of processes outside of the run ran, as the driver samples it"),
    _gpu("gpu_sm", "share", "counter", "SM activity",
         "multiprocessors that had work, mean over all of them and over the whole window"),
    _gpu("gpu_occupancy", "share", "counter", "SM occupancy",
         "warps in flight, of as many as the multiprocessors can hold"),
    _gpu("gpu_tensor", "share", "counter", "tensor cores", "time the tensor cores were busy"),
    _gpu("gpu_fp32", "share", "counter", "FP32", "time the FP32 units were busy, tensor cores not"),
    _gpu("gpu_fp16", "share", "counter", "FP16", "time the FP16 units were busy, tensor cores not"),
    _gpu("gpu_dram", "share", "counter", "GPU memory bandwidth",
         "bytes moved to and from device memory, of as many as it could move"),
    _gpu("gpu_memory_controller", "share", "gauge", "memory controller",
         "time in which device memory was read or written at all, as NVML averages it"),
    _gpu("gpu_memory", "bytes", "gauge", "GPU memory",
         "device memory in use, by everybody, the driver's own included"),
    _gpu("gpu_memory_tree", "bytes", "gauge", "GPU memory of the run",
         "device memory of the watched processes, CUDA contexts included"),
    _gpu("gpu_pcie_received", "bytes/s", "counter", "PCIe to GPU",
         "bytes over PCIe to the device (Rx), protocol included"),
    _gpu("gpu_pcie_sent", "bytes/s", "counter", "PCIe from GPU",
         "bytes over PCIe from the device (Tx), protocol included"),
    _gpu("gpu_nvlink_received", "bytes/s", "counter", "NVLink to GPU", "bytes over all links in"),
    _gpu("gpu_nvlink_sent", "bytes/s", "counter", "NVLink from GPU", "bytes over all links out"),
    _gpu("gpu_power", "W", "gauge", "GPU power", "as drawn at the time of the reading"),
    _gpu("gpu_energy", "W", "counter", "GPU energy", "joules per second by the energy counter"),
    _gpu("gpu_temperature", "°C", "gauge", "GPU temperature", "of the GPU itself"),
    _gpu("gpu_sm_clock", "MHz", "gauge", "SM clock", "of the multiprocessors"),
    _gpu("gpu_memory_clock", "MHz", "gauge", "memory clock", "of the device memory"),
    _gpu("gpu_slowed_power", "share", "gauge", "slowed by power",
         "readings that found the clocks held down by a power limit or a power brake"),
    _gpu("gpu_slowed_heat", "share", "gauge", "slowed by heat",
         "readings that found the clocks held down by temperature"),
    _gpu("gpu_slowed_other", "share", "gauge", "slowed otherwise",
         "readings that found the clocks held down by hardware, by a group or by settings"),
    _gpu("gpu_ecc_corrected", "count", "gauge", "ECC corrected",
         "memory errors that were corrected since the driver was loaded"),
    _gpu("gpu_ecc_uncorrected", "count", "gauge", "ECC uncorrected",
         "memory errors that were not, since the driver was loaded"),
)  # fmt: skip

DERIVED: tuple[Metric, ...] = (
    _process("memory", "bytes", "gauge", "memory",
             "RSS at every sample, less what the nearest PSS reading showed to be shared"),
    # From what PyTorch's allocator says at the ends of steps; of a GPU, all processes together.
    _gpu("gpu_allocated", "bytes", "gauge", "GPU allocated", "held by tensors"),
    _gpu("gpu_reserved", "bytes", "gauge", "GPU reserved",
         "held by the caching allocator: by tensors, or kept for the next ones"),
    _gpu("gpu_allocated_peak", "bytes", "gauge", "GPU allocated peak",
         "most that tensors held at once so far, also between two readings"),
    _gpu("gpu_reserved_peak", "bytes", "gauge", "GPU reserved peak",
         "most that the allocator held at once so far"),
    _gpu("gpu_alloc_retries", "count", "gauge", "GPU allocator retries",
         "times the allocator had to free its cache to go on: the batch is at the edge"),
    _gpu("gpu_alloc_ooms", "count", "gauge", "GPU out of memory", "allocations that failed"),
)  # fmt: skip
"""Computed from samples when a run is read, never stored as a column."""

BY_KEY: dict[str, Metric] = {metric.key: metric for metric in TABLE + DERIVED}


def of_scope(scope: Scope) -> tuple[Metric, ...]:
    """The metrics that are columns of `<scope>.arrows`."""
    return tuple(metric for metric in TABLE if metric.scope == scope)


def is_counter(key: str) -> bool:
    return BY_KEY[key].kind == "counter"
