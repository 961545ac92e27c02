"""The only parser of /proc. See proc(5) for the file formats.

`parse_...` functions take the bytes of a file, for sensors that keep the file open or report read
errors. The other functions read the file and return None or an empty result if it does not exist,
its process has exited, or it may not be read. `proc` is the mount point of the file system.

Uses only a small part of the standard library: the guard of a trial imports this module in a bare
interpreter.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PROC = "/proc"
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = 1.0 / os.sysconf("SC_CLK_TCK")
STAT_BYTES = 1024  # enough for any /proc/PID/stat
KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the flags of a process
HIDDEN_ADDRESS = 1  # start of the code of a process whose memory we may not read


def open_file(pid: int, file: str) -> int:
    """Open a file of a process for repeated reading with `pread`; raises OSError."""
    return os.open(f"{PROC}/{pid}/{file}", os.O_RDONLY | os.O_CLOEXEC)


def read_once(path: str, size: int = 1 << 14) -> bytes:
    """Read a small file in one call, at half the cost of a file object; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def read_all(path: str) -> bytes:
    """Read a file that the kernel returns one page at a time; raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _content(path: str) -> bytes:
    try:
        return read_all(path)
    except OSError:
        return b""


class ProcessStat:
    """Identity and exit status of a process, from /proc/PID/stat."""

    def __init__(self, data: bytes) -> None:
        end = data.rindex(b")")  # a name may contain blanks and parentheses
        self.name = data[data.index(b"(") + 1 : end].decode("utf-8", "replace")
        fields = data[end + 2 :].split()  # starting with the state, field 3 in proc(5)
        self.state = fields[0].decode()
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.flags = int(fields[6])
        self.cpu_s = (int(fields[11]) + int(fields[12])) * TICK
        self.threads = int(fields[17])
        self.started_ticks = int(fields[19])
        """Clock ticks since boot. Together with the pid it identifies a process."""
        self.code_begins = int(fields[23])
        self.last_cpu = int(fields[36])
        self.exit_code = int(fields[49])
        """Wait status of a zombie; 0 if we may not read its memory."""

    @property
    def has_ended(self) -> bool:
        """Whether all threads have exited: the main thread alone shows `Z` too."""
        return self.state in "ZX" and self.threads <= 1


class ProcessUsage:
    """The fields of /proc/PID/stat that change while a process runs.

    It is read often: therefore one record is reused, and only the needed fields are parsed.
    """

    state: str
    parent: int
    faults_minor: int
    faults_major: int
    """Both include children that the process has waited for."""
    reaped_s: float
    """CPU time of children that the process has waited for."""
    threads: int
    rss: int

    def update(self, stat: bytes) -> bytes:
        """Update the fields from the contents of the file; return the process name."""
        name_ends = stat.rfind(b")")
        fields = stat[name_ends + 2 :].split(b" ", 22)
        self.state = fields[0].decode()
        self.parent = int(fields[1])
        self.faults_minor = int(fields[7]) + int(fields[8])
        self.faults_major = int(fields[9]) + int(fields[10])
        self.reaped_s = (int(fields[13]) + int(fields[14])) * TICK
        self.threads = int(fields[17])
        self.rss = int(fields[21]) * PAGE
        return stat[stat.find(b"(") + 1 : name_ends]


def cpu_seconds(stat: bytes) -> float:
    """Return the CPU time of a process without children, in whole ticks, from /proc/PID/stat."""
    fields = stat[stat.rfind(b")") + 2 :].split(b" ", 13)
    return (int(fields[11]) + int(fields[12])) * TICK


def stat(pid: int, proc: str = PROC) -> ProcessStat | None:
    data = _content(f"{proc}/{pid}/stat")
    return ProcessStat(data) if data else None


def start_ticks(pid: int) -> int | None:
    """Return the start time of a running process in clock ticks since boot."""
    process = stat(pid)
    return None if process is None or process.state in "ZX" else process.started_ticks


class Resident(NamedTuple):
    """Resident memory in bytes."""

    total: int
    shared: int
    """The part that is backed by files or shared memory."""


def parse_rss(statm: bytes) -> int:
    """Return the RSS in bytes; 0 for a process that has released its memory."""
    return int(statm.split(b" ", 2)[1]) * PAGE


def statm(pid: int | str) -> Resident | None:
    words = _content(f"{PROC}/{pid}/statm").split(None, 3)
    return Resident(int(words[1]) * PAGE, int(words[2]) * PAGE) if words else None


def _keyed(data: bytes) -> dict[bytes, bytes]:
    """Parse lines of the form `key: value`."""
    pairs = (line.partition(b":") for line in data.splitlines())
    return {key: value.strip() for key, _, value in pairs}


class ProcessStatus:
    """/proc/PID/status."""

    def __init__(self, data: bytes) -> None:
        self._lines = _keyed(data)

    @property
    def thread_group(self) -> int:
        """The pid of the process that a thread belongs to."""
        return int(self._lines[b"Tgid"])

    def ignores(self, signal: int) -> bool:
        return self._has(b"SigIgn", signal)

    def catches(self, signal: int) -> bool:
        return self._has(b"SigCgt", signal)

    def has_pending(self, signal: int) -> bool:
        """Whether a signal was sent to the whole process and is not yet delivered."""
        return self._has(b"ShdPnd", signal)

    def size(self, key: str) -> int | None:
        """Return the value of a line such as VmRSS in bytes."""
        value = self._lines.get(key.encode())
        return None if value is None else int(value.split()[0]) << 10

    def _has(self, key: bytes, signal: int) -> bool:
        return bool(int(self._lines[key], 16) >> (signal - 1) & 1)


def status(pid: int | str) -> ProcessStatus | None:
    data = _content(f"{PROC}/{pid}/status")
    return ProcessStatus(data) if data else None


def reset_peak_memory() -> None:
    """Reset VmHWM of this process, if the kernel allows it."""
    try:
        with open(f"{PROC}/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def parse_io(data: bytes) -> tuple[int, int, int, int]:
    """Return the bytes read from and written to storage, then the bytes read and written by system
    calls, including the page cache and pipes. Includes children that the process has waited for."""
    words = data.split()
    return int(words[9]), int(words[11]), int(words[1]), int(words[3])


class ProportionalMemory(NamedTuple):
    """PSS in bytes: each shared page is divided among the processes that map it."""

    pss: int
    swap: int


def read_smaps_rollup(pid: int) -> ProportionalMemory | None:
    """Return None for an exited process, whose file is empty; raises OSError."""
    lines = _keyed(read_once(f"{PROC}/{pid}/smaps_rollup"))
    if b"Pss" not in lines:
        return None
    pss, swap = (int(lines.get(key, b"0").split()[0]) << 10 for key in (b"Pss", b"SwapPss"))
    return ProportionalMemory(pss, swap)


def proportional_memory(pid: int) -> ProportionalMemory | None:
    try:
        return read_smaps_rollup(pid)
    except OSError:
        return None


def switches(thread: str) -> tuple[int, int] | None:
    """Return the voluntary and involuntary context switches of a thread, from the last two lines of
    its status; None for an exited thread. `thread` is its folder; raises OSError."""
    status = read_once(f"{thread}/status")
    words = status[status.rfind(b"\nvoluntary_ctxt") :].split()
    return (int(words[1]), int(words[3])) if len(words) >= 4 else None


def waits_for_cpu(thread: str) -> tuple[int, int] | None:
    """Return the nanoseconds that a thread was runnable without a CPU, and its number of time
    slices. All 0 if the kernel does not count them; None for an exited thread. `thread` is its
    folder; raises OSError."""
    words = read_once(f"{thread}/schedstat").split()
    return (int(words[1]), int(words[2])) if len(words) > 2 else None


def threads(pid: int, proc: str = PROC) -> list[int]:
    try:
        return [int(entry) for entry in os.listdir(f"{proc}/{pid}/task")]
    except OSError:
        return []


def children() -> list[int]:
    """Return the running children of all threads of this process."""
    lists = (_content(f"{PROC}/self/task/{thread}/children") for thread in threads(os.getpid()))
    return [int(pid) for listed in lists for pid in listed.split()]


def pids(proc: str = PROC) -> list[int]:
    return [int(entry) for entry in os.listdir(proc) if entry.isdigit()]


def pids_of_user(user: int) -> Iterator[int]:
    for entry in os.scandir(PROC):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == user:
                yield int(entry.name)
        except OSError:
            continue


def owner(pid: int) -> int | None:
    """Return the user id of a process."""
    try:
        return os.stat(f"{PROC}/{pid}").st_uid
    except OSError:
        return None


def exists(pid: int) -> bool:
    return owner(pid) is not None


def name(pid: int) -> str | None:
    return _content(f"{PROC}/{pid}/comm").decode("utf-8", "replace").strip() or None


def set_own_name(name: str) -> None:
    try:
        with open(f"{PROC}/self/comm", "w") as file:
            file.write(name)
    except OSError:
        pass


def command_line(pid: int) -> list[str]:
    text = os.fsdecode(_content(f"{PROC}/{pid}/cmdline")).rstrip("\0")
    return text.split("\0") if text else []


def environ(pid: int, proc: str = PROC) -> dict[str, str]:
    """Return the environment at the start of the process."""
    text = os.fsdecode(_content(f"{proc}/{pid}/environ"))
    pairs = (entry.partition("=") for entry in text.split("\0") if entry)
    return {name: value for name, _, value in pairs}


def environ_value(pid: int, variable: str) -> str | None:
    """Return one variable; cheaper than `environ` when searching many processes."""
    data = b"\0" + _content(f"{PROC}/{pid}/environ")
    _, key, rest = data.partition(f"\0{variable}=".encode())
    return os.fsdecode(rest.partition(b"\0")[0]) if key else None


def working_directory(pid: int) -> str | None:
    return _link(f"{PROC}/{pid}/cwd")


def pid_namespace() -> str | None:
    """Return the PID namespace of this process, for example "pid:[4026531836]"."""
    return _link(f"{PROC}/self/ns/pid")


def pid_home() -> str:
    """Return 8 characters that identify this boot and PID namespace, where pids are comparable."""
    return f"{zlib.crc32(f'{boot_id()} {pid_namespace()}'.encode()):08x}"


def network_namespace(pid: int) -> int | None:
    """Return the inode of the network namespace of a process."""
    try:
        return os.stat(f"{PROC}/{pid}/ns/net").st_ino
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def files_in_use(pid: int) -> Iterator[tuple[int, int]]:
    """Yield device and inode of all files that a process has open or mapped."""
    folder = f"{PROC}/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        descriptors = []
    for descriptor in descriptors:
        try:
            status = os.stat(f"{folder}/{descriptor}")
        except OSError:
            continue
        yield status.st_dev, status.st_ino
    for line in _content(f"{PROC}/{pid}/maps").splitlines():
        device, inode = line.split(None, 5)[3:5]
        major, minor = device.split(b":")
        yield os.makedev(int(major, 16), int(minor, 16)), int(inode)


def boot_id() -> str | None:
    return _content(f"{PROC}/sys/kernel/random/boot_id").decode().strip() or None


class CpuTimes(NamedTuple):
    """CPU time of all CPUs since boot, in core-seconds."""

    busy: float
    iowait: float
    steal: float


def parse_cpu_times(data: bytes) -> CpuTimes:
    """Parse the first line of /proc/stat."""
    words = data.split(b"\n", 1)[0].split()
    if words[0] != b"cpu":
        raise ValueError(words[0])
    return _cpu_times(words)


def _cpu_times(words: list[bytes]) -> CpuTimes:
    """Parse a line of /proc/stat. `user` includes guests."""
    user, nice, system, _, iowait, irq, softirq, steal = map(int, words[1:9])
    busy = user + nice + system + irq + softirq
    return CpuTimes(busy * TICK, iowait * TICK, steal * TICK)


def busy_seconds(cpus: Iterable[int], proc: str = PROC) -> float:
    """Return the busy time of some CPUs since boot, in core-seconds."""
    names = {f"cpu{cpu}".encode() for cpu in cpus}
    lines = [line.split() for line in _content(f"{proc}/stat").splitlines()]
    return sum(_cpu_times(words).busy for words in lines if words and words[0] in names)


def load_average(proc: str = PROC) -> float | None:
    """Return the load average of the last minute."""
    words = _content(f"{proc}/loadavg").split(None, 1)
    return float(words[0]) if words else None


# Starts with a literal instead of "^", which is three times as fast.
_MEMORY_LINE = re.compile(
    rb"\n(MemTotal|MemAvailable|Buffers|Cached|Shmem|Dirty|SwapTotal|SwapFree): +(\d+)"
)


class MemoryInfo(NamedTuple):
    """Memory of the whole machine in bytes; None for values that the kernel does not list."""

    total: int | None
    available: int | None
    used: int | None
    page_cache: int | None
    """Without shared memory: `Cached` includes tmpfs and shared mappings, which are not cached
    files and cannot be dropped to free memory."""
    dirty_pages: int | None
    swap_total: int | None
    swap_used: int | None


def parse_meminfo(data: bytes) -> MemoryInfo:
    sizes = {key: int(kib) << 10 for key, kib in _MEMORY_LINE.findall(b"\n" + data)}
    get = sizes.get
    total, available, cached = get(b"MemTotal"), get(b"MemAvailable"), get(b"Cached")
    swap_total, swap_free = get(b"SwapTotal"), get(b"SwapFree")
    used = None if total is None or available is None else total - available
    if cached is not None:
        cached = max(0, cached + get(b"Buffers", 0) - get(b"Shmem", 0))
    swap_used = None if swap_total is None or swap_free is None else swap_total - swap_free
    return MemoryInfo(total, available, used, cached, get(b"Dirty"), swap_total, swap_used)


def meminfo(proc: str = PROC) -> MemoryInfo:
    return parse_meminfo(_content(f"{proc}/meminfo"))


_PRESSURE_LINE = re.compile(rb"^(some|full) .*total=(\d+)", re.MULTILINE)


def parse_pressure(data: bytes) -> dict[bytes, float]:
    """Return the seconds since boot in which `some` or all (`full`) tasks stalled."""
    return {kind: int(total) / 1e6 for kind, total in _PRESSURE_LINE.findall(data)}


def parse_newest_process(loadavg: bytes) -> bytes:
    """Return the last pid that was assigned, as the kernel writes it."""
    return loadavg.rsplit(None, 1)[-1]


def oom_kills() -> int | None:
    """Return the number of OOM kills in all cgroups since boot."""
    match = re.search(rb"^oom_kill (\d+)$", _content(f"{PROC}/vmstat"), re.MULTILINE)
    return int(match[1]) if match else None


Traffic = dict[str, tuple[int, int]]
"""Interface to bytes received and sent."""


def parse_interfaces(data: bytes) -> Traffic:
    """Parse /proc/PID/net/dev: two header lines, then one line per interface."""
    traffic = {}
    for line in data.splitlines()[2:]:
        interface, _, counts = line.rpartition(b":")
        words = counts.split()
        if interface and len(words) > 8:
            key = interface.strip().decode(errors="replace")
            traffic[key] = (int(words[0]), int(words[8]))
    return traffic


class Mount(NamedTuple):
    """A line of mountinfo."""

    root: str
    """The directory of the file system that is visible at the mount point."""
    point: str
    device_number: str
    filesystem: str
    device: str
    options: str
    """Options of the file system."""


def parse_mounts(text: str) -> list[Mount]:
    def unescaped(word: str) -> str:
        """Decode the octal escapes that the kernel writes for blanks in paths."""
        return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)

    mounts = []
    for line in text.splitlines():
        place, _, kind = line.partition(" - ")
        words, kinds = place.split(), kind.split(" ")
        if len(words) > 4 and len(kinds) > 2:
            root, point = (unescaped(word) for word in words[3:5])
            mounts.append(Mount(root, point, words[2], *kinds[:3]))
    return mounts


def mounts(proc: str = PROC) -> list[Mount]:
    """Return the mounts that this process sees."""
    return parse_mounts(_content(f"{proc}/self/mountinfo").decode(errors="replace"))


def mount_of(path: str | os.PathLike[str], mounts: list[Mount]) -> Mount | None:
    """Return the innermost mount of a resolved path; at one mount point, the latest."""
    inside = f"{os.fspath(path).rstrip('/')}/"
    matching = [mount for mount in mounts if inside.startswith(f"{mount.point.rstrip('/')}/")]
    return max(reversed(matching), key=lambda mount: len(mount.point), default=None)


def cgroup_paths(pid: int, proc: str = PROC) -> dict[str, str]:
    """Return controller to path, from /proc/PID/cgroup; the key of version 2 is "". Raises
    OSError."""
    paths = {}
    for line in read_once(f"{proc}/{pid}/cgroup").decode(errors="replace").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


class CpuInfo(NamedTuple):
    model: str | None
    """Name given by the manufacturer."""
    is_virtual: bool | None


def cpuinfo(proc: str = PROC) -> CpuInfo:
    """Parse the entry of the first CPU; reading the whole file queries the clock of every CPU."""
    try:
        data = read_once(f"{proc}/cpuinfo", 4096)
    except OSError:
        return CpuInfo(None, None)
    model = re.search(rb"^model name\s*:(.*)", data, re.MULTILINE)
    name = model[1].decode(errors="replace").strip() if model else None
    return CpuInfo(name, b" hypervisor" in data if data else None)


class NvidiaGpu(NamedTuple):
    model: str | None
    uuid: str | None
    bus: str


def nvidia_gpus(proc: str = PROC) -> list[NvidiaGpu]:
    """Return the GPUs that the NVIDIA kernel module lists; works without NVML."""
    folder = f"{proc}/driver/nvidia/gpus"
    try:
        places = sorted(os.listdir(folder))
    except OSError:
        return []
    gpus = []
    for place in places:
        lines = _keyed(_content(f"{folder}/{place}/information"))
        model, uuid = (lines.get(key, b"").decode() or None for key in (b"Model", b"GPU UUID"))
        gpus.append(NvidiaGpu(model, uuid, place))
    return gpus


def nvidia_driver(proc: str = PROC) -> str | None:
    data = _content(f"{proc}/driver/nvidia/version")
    match = re.search(rb"^NVRM version:.*?\s(\d{3,}\.[\d.]+)", data, re.MULTILINE)
    return match[1].decode() if match else None
