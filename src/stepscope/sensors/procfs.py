"""The only parser of /proc: see proc(5) for what the files hold.

`parse_...` takes the bytes of a file, for a sensor that keeps it open or reports why it cannot be
read. The other functions read the file themselves, and give None or nothing where it is not there,
its process has ended, or it may not be read. `proc` is where the file system is mounted.

Standard library only, and little of it: the guard of a trial imports this in a bare interpreter.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

PROC = "/proc"
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = 1.0 / os.sysconf("SC_CLK_TCK")
STAT_BYTES = 1024  # enough for any /proc/PID/stat
KERNEL_THREAD = 0x00200000  # PF_KTHREAD among the flags of a process
HIDDEN_ADDRESS = 1  # the start of the code of a process that we may not look into


def open_file(pid: int, file: str) -> int:
    """A descriptor of a file of a process, to be kept and read with `pread`; raises OSError."""
    return os.open(f"{PROC}/{pid}/{file}", os.O_RDONLY | os.O_CLOEXEC)


def read_once(path: str, size: int = 1 << 14) -> bytes:
    """A small file in one reading, at half the price of a file object; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def read_all(path: str) -> bytes:
    """A file of many records, of which the kernel gives a page at a time; raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _content(path: str) -> bytes:
    try:
        return read_all(path)
    except OSError:
        return b""


class ProcessStat:
    """What tells a process from others, and how it ended, from /proc/PID/stat."""

    def __init__(self, data: bytes) -> None:
        end = data.rindex(b")")  # a name may hold blanks and brackets
        self.name = data[data.index(b"(") + 1 : end].decode("utf-8", "replace")
        fields = data[end + 2 :].split()  # from the state on, which proc(5) counts as the third
        self.state = fields[0].decode()
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.flags = int(fields[6])
        self.threads = int(fields[17])
        self.started_ticks = int(fields[19])
        """Clock ticks since boot. With the number, this tells a process from all others."""
        self.code_begins = int(fields[23])
        self.exit_code = int(fields[49])
        """The wait status of a zombie; 0 where we may not look into it."""

    @property
    def has_ended(self) -> bool:
        """A main thread that has ended leaves a `Z`, too, while other threads go on."""
        return self.state in "ZX" and self.threads <= 1


class ProcessUsage:
    """What changes in /proc/PID/stat while a process runs. Read so often that one record is kept,
    and only the fields in use are split and made numbers."""

    state: str
    parent: int
    faults_minor: int
    faults_major: int
    """Both with those of the children it waited for."""
    reaped_s: float
    """CPU time of the children it waited for."""
    threads: int
    rss: int

    def update(self, stat: bytes) -> bytes:
        """Take over what the file says now; gives the name."""
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
    """Of a process itself, to whole ticks, from its /proc/PID/stat."""
    fields = stat[stat.rfind(b")") + 2 :].split(b" ", 13)
    return (int(fields[11]) + int(fields[12])) * TICK


def stat(pid: int, proc: str = PROC) -> ProcessStat | None:
    data = _content(f"{proc}/{pid}/stat")
    return ProcessStat(data) if data else None


def start_ticks(pid: int) -> int | None:
    """When a living process started, in clock ticks since boot."""
    found = stat(pid)
    return None if found is None or found.state in "ZX" else found.started_ticks


class Resident(NamedTuple):
    """Bytes of physical memory."""

    total: int
    shared: int
    """Of files and of shared memory, within the total."""


def parse_rss(statm: bytes) -> int:
    """Bytes; 0 of a process that has given up its memory."""
    return int(statm.split(b" ", 2)[1]) * PAGE


def statm(pid: int | str) -> Resident | None:
    words = _content(f"{PROC}/{pid}/statm").split(None, 3)
    return Resident(int(words[1]) * PAGE, int(words[2]) * PAGE) if words else None


def _keyed(data: bytes) -> dict[bytes, bytes]:
    """Lines `key: value`."""
    pairs = (line.partition(b":") for line in data.splitlines())
    return {key: value.strip() for key, _, value in pairs}


class ProcessStatus:
    """/proc/PID/status, of which each reader needs a line or two."""

    def __init__(self, data: bytes) -> None:
        self._lines = _keyed(data)

    @property
    def thread_group(self) -> int:
        """The process that a thread is of; a process has its own number."""
        return int(self._lines[b"Tgid"])

    def ignores(self, signal: int) -> bool:
        return self._has(b"SigIgn", signal)

    def catches(self, signal: int) -> bool:
        return self._has(b"SigCgt", signal)

    def has_pending(self, signal: int) -> bool:
        """Whether a signal was sent to the process as a whole and was not delivered yet."""
        return self._has(b"ShdPnd", signal)

    def size(self, key: str) -> int | None:
        """Bytes of a line such as VmRSS."""
        value = self._lines.get(key.encode())
        return None if value is None else int(value.split()[0]) << 10

    def _has(self, key: bytes, signal: int) -> bool:
        return bool(int(self._lines[key], 16) >> (signal - 1) & 1)


def status(pid: int | str) -> ProcessStatus | None:
    data = _content(f"{PROC}/{pid}/status")
    return ProcessStatus(data) if data else None


def reset_peak_memory() -> None:
    """Let VmHWM of this process begin anew, where the kernel allows it."""
    try:
        with open(f"{PROC}/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def parse_io(data: bytes) -> tuple[int, int, int, int]:
    """Bytes read and written since the start of a process and of the children it waited for: at the
    storage, then by system calls, from the page cache and pipes too."""
    words = data.split()
    return int(words[9]), int(words[11]), int(words[1]), int(words[3])


class ProportionalMemory(NamedTuple):
    """Bytes with every shared page divided among its users."""

    pss: int
    swap: int


def read_smaps_rollup(pid: int) -> ProportionalMemory | None:
    """None for a process that has ended, whose file is empty; raises OSError."""
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
    """Voluntary and involuntary ones, from the last two lines of a thread's status; None for a
    thread that has ended. `thread` is its folder; raises OSError."""
    status = read_once(f"{thread}/status")
    words = status[status.rfind(b"\nvoluntary_ctxt") :].split()
    return (int(words[1]), int(words[3])) if len(words) >= 4 else None


def waits_for_cpu(thread: str) -> tuple[int, int] | None:
    """Nanoseconds ready to run without a CPU, and turns on one. All 0 where the kernel does not
    count; None for a thread that has ended. `thread` is its folder; raises OSError."""
    words = read_once(f"{thread}/schedstat").split()
    return (int(words[1]), int(words[2])) if len(words) > 2 else None


def threads(pid: int, proc: str = PROC) -> list[int]:
    try:
        return [int(entry) for entry in os.listdir(f"{proc}/{pid}/task")]
    except OSError:
        return []


def children() -> list[int]:
    """The living children of this process, of all its threads."""
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
    """The user id."""
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
    """As it was when the process was started."""
    text = os.fsdecode(_content(f"{proc}/{pid}/environ"))
    pairs = (entry.partition("=") for entry in text.split("\0") if entry)
    return {name: value for name, _, value in pairs}


def environ_value(pid: int, variable: str) -> str | None:
    """One variable only, for a search among many processes."""
    data = b"\0" + _content(f"{PROC}/{pid}/environ")
    _, found, rest = data.partition(f"\0{variable}=".encode())
    return os.fsdecode(rest.partition(b"\0")[0]) if found else None


def working_directory(pid: int) -> str | None:
    return _link(f"{PROC}/{pid}/cwd")


def pid_namespace() -> str | None:
    """In which numbers of processes mean what they do here: "pid:[4026531836]"."""
    return _link(f"{PROC}/self/ns/pid")


def pid_home() -> str:
    """This boot and this PID namespace, in 8 characters: within it a number is one process."""
    return f"{zlib.crc32(f'{boot_id()} {pid_namespace()}'.encode()):08x}"


def network_namespace(pid: int) -> int | None:
    """Its inode."""
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
    """Device and inode of all files that a process has open or mapped."""
    folder = f"{PROC}/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        descriptors = []
    for descriptor in descriptors:
        try:
            found = os.stat(f"{folder}/{descriptor}")
        except OSError:
            continue
        yield found.st_dev, found.st_ino
    for line in _content(f"{PROC}/{pid}/maps").splitlines():
        device, inode = line.split(None, 5)[3:5]
        major, minor = device.split(b":")
        yield os.makedev(int(major, 16), int(minor, 16)), int(inode)


def boot_id() -> str | None:
    return _content(f"{PROC}/sys/kernel/random/boot_id").decode().strip() or None


class CpuTimes(NamedTuple):
    """Core-seconds of all CPUs since boot."""

    busy: float
    iowait: float
    steal: float


def parse_cpu_times(data: bytes) -> CpuTimes:
    """From the first line of /proc/stat. Guests are part of `user` there."""
    words = data.split(b"\n", 1)[0].split()
    if words[0] != b"cpu":
        raise ValueError(words[0])
    user, nice, system, _, iowait, irq, softirq, steal = map(int, words[1:9])
    busy = user + nice + system + irq + softirq
    return CpuTimes(busy * TICK, iowait * TICK, steal * TICK)


# Begins with a literal, not with "^": that takes a third of the time.
_MEMORY_LINE = re.compile(
    rb"\n(MemTotal|MemAvailable|Buffers|Cached|Shmem|Dirty|SwapTotal|SwapFree): +(\d+)"
)


class MemoryInfo(NamedTuple):
    """Bytes of the whole machine; None for what the kernel does not list."""

    total: int | None
    available: int | None
    used: int | None
    page_cache: int | None
    """Without shared memory: `Cached` counts the pages of tmpfs and of shared mappings too, but
    those hold no file of a disk and cannot be dropped to make room."""
    dirty: int | None
    swap_total: int | None
    swap_used: int | None


def parse_meminfo(data: bytes) -> MemoryInfo:
    found = {key: int(kib) << 10 for key, kib in _MEMORY_LINE.findall(b"\n" + data)}
    get = found.get
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
    """Seconds since boot in which `some`, or all (`full`), tasks stalled."""
    return {kind: int(total) / 1e6 for kind, total in _PRESSURE_LINE.findall(data)}


def parse_newest_process(loadavg: bytes) -> bytes:
    """The number that was given out last, as the kernel writes it."""
    return loadavg.rsplit(None, 1)[-1]


def oom_kills() -> int | None:
    """Processes of any cgroup that the kernel killed for memory."""
    found = re.search(rb"^oom_kill (\d+)$", _content(f"{PROC}/vmstat"), re.MULTILINE)
    return int(found[1]) if found else None


Traffic = dict[str, tuple[int, int]]
"""Interface to bytes received and sent."""


def parse_interfaces(data: bytes) -> Traffic:
    """From /proc/PID/net/dev: two lines of headings, then one for each interface."""
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
    """What of the file system is visible at the mount point."""
    point: str
    device_number: str
    filesystem: str
    device: str
    options: str
    """Of the file system."""


def parse_mounts(text: str) -> list[Mount]:
    def unescaped(word: str) -> str:
        """The kernel writes blanks in paths as octal numbers."""
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
    """As this process sees them."""
    return parse_mounts(_content(f"{proc}/self/mountinfo").decode(errors="replace"))


def mount_of(path: str | os.PathLike[str], mounts: list[Mount]) -> Mount | None:
    """The innermost, and of several at the same point the latest, that holds a resolved path."""
    inside = f"{os.fspath(path).rstrip('/')}/"
    holding = [mount for mount in mounts if inside.startswith(f"{mount.point.rstrip('/')}/")]
    return max(reversed(holding), key=lambda mount: len(mount.point), default=None)


def cgroup_paths(pid: int, proc: str = PROC) -> dict[str, str]:
    """Controller to path, from /proc/PID/cgroup; version 2 stands under the empty name. Raises
    OSError."""
    paths = {}
    for line in read_once(f"{proc}/{pid}/cgroup").decode(errors="replace").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


class CpuInfo(NamedTuple):
    model: str | None
    """What its maker calls it."""
    is_virtual: bool | None


def cpuinfo(proc: str = PROC) -> CpuInfo:
    """Of the first CPU: reading all of the file asks every one for its clock."""
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
    """What NVIDIA's kernel module tells without its library."""
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
    found = re.search(rb"^NVRM version:.*?\s(\d{3,}\.[\d.]+)", data, re.MULTILINE)
    return found[1].decode() if found else None
