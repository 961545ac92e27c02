"""How a watched process reports marks and steps: 32-byte records appended with plain write().

Every record is on disk (in the page cache) when the call returns, so nothing is lost when the
process is killed; each process writes a file of its own, `<folder>/<pid>.bin`. Nothing here ever
raises into the script that is watched.

    time_ns int64 | kind uint16 | flags uint16 | number uint32 | a int64 | b int64

The time is CLOCK_MONOTONIC, the clock of the samples. A text is told once, as NAME records of up
to 16 bytes each, and then meant by its 64-bit id. `docs/run-folder.md` lists what each kind holds.
"""

import fcntl
import os
import struct
import sys
import time

RECORD = struct.Struct("<qHHIqq")
NAME_RECORD = struct.Struct("<qHHI16s")
SIZE = RECORD.size
FOLDER_VARIABLE = "STEPSCOPE_EVENTS"

START = 1  # a: rank or -1, b: version of Python, number: parent's pid
ATTACHED = 2  # a: name of what the hook attached to ("DataLoader")
NAME = 3  # a text: id, piece, length, 16 bytes
SEEN = 4  # a: name of a framework, b: name of its version
LOADER_BEGIN = 5  # number: which loader, a: ns spent in iter(), b: batches or -1
BATCH = 6  # number: which loader, a: ns waited for the batch, b: samples in it or -1
LOADER_END = 7  # number: which loader, a: ns waited until it said that it was exhausted
STEP = 8  # number: which optimizer, a: steps since the last record (1)
MARK = 9  # a: name, b: value; flags: VALUE_*
PHASE_BEGIN = 10  # a: name, b: value; flags: VALUE_*
PHASE_END = 11  # a: name, b: value; flags: VALUE_*
DROPPED = 12  # a: records that could not be written before this one
RANK = 13  # a: rank, where it became known after START
GPU = 14  # number: which CUDA device, a: name of its UUID, told before anything of the device
GPU_MEMORY = 15  # number: which device, a: bytes allocated, b: bytes reserved
GPU_PEAK = 16  # number: which device, a: most bytes allocated so far, b: most reserved
GPU_RETRIES = 17  # number: which device, a: allocator retries so far, b: allocations that failed
GPU_OOM = 18  # a: message of the error that ended the process: a GPU had no memory left
LOADER = 19  # number: which loader, a: workers | prefetched batches << 16, b: batch size; flags
LOADER_MADE = 20  # number: which loader, a: name of the line of code that made it
PREPARED = 21  # a: ns for the samples of a batch, b: ns of CPU in that; number: µs without a CPU
COLLATED = 22  # a: ns to make a batch of them, b: ns of CPU in that; number: µs without a CPU
DEVICE_STEP = 23  # a: ns the device took from batch to end, b: ns the host took to queue it; flags
WHERE = 24  # a: name of where the training thread was, b: µs of the time since the last ones
SETTINGS = 25  # a: name of a text in JSON: what the framework is set to
LAST_KIND = SETTINGS

LOADER_PINS, LOADER_PERSISTS = 1, 2  # flags of LOADER
HOST_AHEAD = 1  # flag of DEVICE_STEP: the device had not begun the step when it was all queued

VALUE_NONE, VALUE_INT, VALUE_FLOAT, VALUE_TEXT = 0, 1, 2, 3

FROM_FIT = 16  # added to the flags of what came from Keras' fit and evaluate
FROM_PATTERN = 32  # added to the flags of what was matched on the output

_FD_ABOVE = 64
"""How far below the limit of descriptors ours is put: a script that closes all it knows and opens
its own files gets low numbers, so that a number of ours is never taken for a file of the script."""

_MOST_KEPT = 32768 * SIZE
"""Bytes of records kept in memory while they cannot be written."""

_now = time.monotonic_ns
_pack = RECORD.pack
_write = os.write


def name_id(text):
    """The id of a text: 63 bits, the same in every process."""
    import hashlib

    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFFFFFFFFFF


def name_records(text):
    """The records that tell a text once."""
    data = text.encode("utf-8", "replace")[:1024]
    pieces = [data[i : i + 16] for i in range(0, len(data), 16)] or [b""]
    ident = name_id(text)
    return b"".join(
        NAME_RECORD.pack(ident, NAME, index, len(data), piece) for index, piece in enumerate(pieces)
    )


def encode_value(value):
    """(flags, integer) for the value of a mark; a text is given by name through the Writer."""
    if value is None:
        return VALUE_NONE, 0
    if isinstance(value, (bool, int)):
        return VALUE_INT, max(-(2**63), min(2**63 - 1, int(value)))
    return VALUE_FLOAT, struct.unpack("<q", struct.pack("<d", float(value)))[0]


class Writer:
    """Appends records of this process; starts a file of its own after a fork; never raises."""

    def __init__(self, folder, file=None):
        """`file` is what several processes share; else each has one of its own."""
        self.folder = folder
        self._file_name = file
        self._rank = -1
        self.reset()

    def write(self, kind, flags=0, number=0, a=0, b=0):
        self._append(_pack(_now(), kind, flags, number & 0xFFFFFFFF, a, b))

    def write_named(self, kind, text, flags=0, number=0, b=0):
        """A record whose `a` is a text."""
        self.write(kind, flags, number, self._tell(text), b)

    def prepared(self, samples, batch):
        """How long one batch took to prepare: (wall, CPU, without a CPU) of its samples, and of
        putting them together."""
        now = _now()
        self._append(
            _pack(now, PREPARED, 0, samples[2] // 1000 & 0xFFFFFFFF, samples[0], samples[1])
            + _pack(now, COLLATED, 0, batch[2] // 1000 & 0xFFFFFFFF, batch[0], batch[1])
        )

    def mark(self, kind, text, value, flags=0):
        """A mark or the edge of a phase, with any name and value a user gives."""
        try:
            if value is None or isinstance(value, (bool, int, float)):
                shape, number = encode_value(value)
            else:
                shape, number = VALUE_TEXT, self._tell(str(value))
            self.write_named(kind, str(text), shape | flags, b=number)
        except Exception:  # an object that cannot even be shown
            pass

    def seen(self, framework, version):
        self.write_named(SEEN, framework, b=self._tell(str(version)))

    def learn_rank(self):
        """Tell the rank where it became known only after the start (mp.spawn sets it late)."""
        rank = _rank()
        if rank != self._rank:
            self._rank = rank
            self.write(RANK, a=rank)

    def gpu_memory(self, device, uuid, memory, peak, retries):
        """What the allocator of a CUDA device says; of what seldom changes only the news."""
        if device not in self._gpus:
            self._gpus[device] = None
            self.write_named(GPU, uuid, number=device)
        self.write(GPU_MEMORY, 0, device, *memory)
        if self._gpus[device] != (peak, retries):
            self._gpus[device] = (peak, retries)
            self.write(GPU_PEAK, 0, device, *peak)
            self.write(GPU_RETRIES, 0, device, *retries)

    def gpus_given_back(self):
        """The process ends: it holds nothing any more."""
        for device in self._gpus:
            self.write(GPU_MEMORY, 0, device)

    def close(self):
        """Nothing more will be reported."""
        if self._is_open():
            os.close(self._fd)
        self._fd = -1

    def reset(self):
        """After a fork: the child opens a file of its own when it has something to say."""
        self._fd = -1
        self._started = False
        self._told = set()
        self._gpus = {}
        self._kept = b""
        self._dropped = 0

    def _tell(self, text):
        ident = name_id(text)
        if ident not in self._told:
            self._told.add(ident)
            self._append(name_records(text))
        return ident

    def _append(self, data):
        try:
            start = b"" if self._is_open() else self._open()
            if start or self._kept:
                data, self._kept = start + self._kept + data, b""
            written = _write(self._fd, data)
        except OSError:
            self._keep(data)
            return
        if written != len(data):
            self._cut()
            self._keep(data[written // SIZE * SIZE :])
        elif self._dropped:
            dropped, self._dropped = self._dropped, 0
            self.write(DROPPED, a=dropped)

    def _is_open(self):
        """Whether the descriptor is still ours: a script may close all it finds and then open its
        own files, and ours must never be written into one of those."""
        if self._fd < 0:
            return False
        try:
            now = os.fstat(self._fd)
        except OSError:
            return False
        return now.st_ino == self._file.st_ino and now.st_dev == self._file.st_dev

    def _open(self):
        """Open the file of this process; the record it begins with."""
        path = os.path.join(self.folder, self._file_name or "%d.bin" % os.getpid())
        self._fd = open_high(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = os.fstat(self._fd)
        if self._started:
            return b""
        self._started = True
        self._rank = _rank()
        return _pack(_now(), START, 0, os.getppid(), self._rank, sys.hexversion)

    def _keep(self, data):
        """The disk is full, or the folder is gone: keep what can be kept, count the rest."""
        room = _MOST_KEPT - len(self._kept)
        self._kept += data[:room]
        if len(data) > room:
            self._dropped += (len(data) - room) // SIZE
            self._told.clear()

    def _cut(self):
        """A record was written in part (full disk): take the part back, to stay aligned."""
        try:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size // SIZE * SIZE)
        except OSError:
            pass


def _rank():
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        try:
            return int(os.environ[name])
        except (KeyError, ValueError):
            continue
    return -1


def open_high(path, flags=os.O_RDONLY):
    """Open a file under a number that scripts do not use (see `_FD_ABOVE`)."""
    import resource

    low = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        number = max(3, (soft if 0 <= soft <= 1024 else 1024) - _FD_ABOVE)
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, number)
    except OSError:
        return low
    os.close(low)
    return high


current = None
"""The writer of this process, or None when nobody watches."""


def report_to(folder):
    """Report to a folder from now on, to nobody if it is None; who was reported to before."""
    return report_with(Writer(folder) if folder else None)


def report_with(writer):
    """Go on with a writer that was used before."""
    global current
    before, current = current, writer
    return before


def _after_fork():
    if current is not None:
        current.reset()


os.register_at_fork(after_in_child=_after_fork)
report_to(os.environ.get(FOLDER_VARIABLE))

# The hook loads this file by path, a script that marks imports it from the package: whoever comes
# first is the one both use, so that a process has one writer.
sys.modules.setdefault("_stepscope_events", sys.modules[__name__])
