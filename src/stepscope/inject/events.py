"""Write the events of a monitored process: 32-byte records, appended with plain write().

Every record is in the page cache when the call returns, so that no record is lost when the process
is killed. Each process writes its own file, `<folder>/<pid>.bin`. Nothing here raises exceptions
into the monitored script.

    time_ns int64 | kind uint16 | flags uint16 | number uint32 | a int64 | b int64

The time is CLOCK_MONOTONIC, as in the samples. A text is written once, as NAME records of up to 16
bytes each, and then referred to by its 63-bit ID. `docs/run-folder.md` describes all kinds.
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

START = 1  # a: rank or -1, b: version of Python, number: pid of the parent
ATTACHED = 2  # a: name of what the hook attached to ("DataLoader")
NAME = 3  # a text: id, index of the piece, length, 16 bytes
SEEN = 4  # a: name of an imported framework, b: name of its version
LOADER_BEGIN = 5  # number: loader, a: ns spent in iter(), b: batches or -1
BATCH = 6  # number: loader, a: ns waited for the batch, b: samples in it or -1
LOADER_END = 7  # number: loader, a: ns waited until it was exhausted
STEP = 8  # number: optimizer, a: steps since the last record (1)
MARK = 9  # a: name, b: value; flags: VALUE_*
PHASE_BEGIN = 10  # a: name, b: value; flags: VALUE_*
PHASE_END = 11  # a: name, b: value; flags: VALUE_*
DROPPED = 12  # a: number of records that could not be written before this one
RANK = 13  # a: rank, if it became known after START
GPU = 14  # number: CUDA device, a: name of its UUID; precedes all other records of the device
GPU_MEMORY = 15  # number: device, a: bytes allocated, b: bytes reserved
GPU_PEAK = 16  # number: device, a: peak bytes allocated, b: peak bytes reserved
GPU_RETRIES = 17  # number: device, a: allocator retries so far, b: failed allocations so far
GPU_OOM = 18  # a: message of the GPU out-of-memory error that ended the process
LOADER = 19  # number: loader, a: workers | prefetched batches << 16, b: batch size; flags
LOADER_MADE = 20  # number: loader, a: name of the line of code that created it
PREPARED = 21  # a: ns to load the samples of a batch, b: CPU ns of that; number: µs without a CPU
COLLATED = 22  # a: ns to collate a batch, b: CPU ns of that; number: µs without a CPU
DEVICE_STEP = 23  # a: ns of a step on the device, b: ns that the host took to queue it; flags
WHERE = 24  # a: name of a stack location of the training thread, b: µs spent there
SETTINGS = 25  # a: name of a JSON text with the settings of the framework
LAST_KIND = SETTINGS

LOADER_PINS, LOADER_PERSISTS = 1, 2  # flags of LOADER
HOST_AHEAD = 1  # flag of DEVICE_STEP: the device had not started the step when it was fully queued

VALUE_NONE, VALUE_INT, VALUE_FLOAT, VALUE_TEXT = 0, 1, 2, 3

FROM_FIT = 16  # flag of records from Keras' fit and evaluate
FROM_PATTERN = 32  # flag of marks that were matched in the output

_FD_DISTANCE = 64
"""Distance of our descriptor from the limit of open files. A script that closes all descriptors and
then opens files gets low numbers, so that ours cannot be one of them."""

_MAX_BUFFERED = 32768 * SIZE
"""Bytes of records that are kept in memory if they cannot be written."""

_MAX_NAMES = 4096
"""Texts whose ids are kept. The others are written again."""

_STORED_BYTES = 1024
_MAX_TEXT = 4096
"""Characters of a text that are masked. A credential may begin in the stored part and end later."""

_now = time.monotonic_ns
_pack = RECORD.pack
_write = os.write


def name_id(text):
    """Return the id of a text: 63 bits, the same in every process."""
    import hashlib

    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFFFFFFFFFF


def _mask(text, name):
    """Mask the credentials in a text, which may have a name. The module is loaded with the first
    text."""
    module = "_stepscope_masking"
    try:
        if module not in sys.modules:
            from importlib.machinery import SourceFileLoader

            path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "masking.py")
            masking = type(sys)(module)
            exec(SourceFileLoader(module, path).get_code(module), masking.__dict__)
            sys.modules[module] = masking
        return sys.modules[module].mask_values(text, name)
    except Exception:  # without the module, no text is stored
        return "***"


def name_records(text):
    """Return the NAME records of a text."""
    data = text.encode("utf-8", "replace")[:_STORED_BYTES]
    pieces = [data[i : i + 16] for i in range(0, len(data), 16)] or [b""]
    ident = name_id(text)
    return b"".join(
        NAME_RECORD.pack(ident, NAME, index, len(data), piece) for index, piece in enumerate(pieces)
    )


def encode_value(value):
    """Return (flags, integer) for the numeric value of a mark."""
    if value is None:
        return VALUE_NONE, 0
    if isinstance(value, (bool, int)):
        return VALUE_INT, max(-(2**63), min(2**63 - 1, int(value)))
    return VALUE_FLOAT, struct.unpack("<q", struct.pack("<d", float(value)))[0]


class Writer:
    """Appends the records of this process, and starts a new file after a fork. Never raises."""

    def __init__(self, folder, file=None):
        """`file` is shared by several processes; by default each process has its own."""
        self.folder = folder
        self._file_name = file
        self._rank = -1
        self.reset()

    def write(self, kind, flags=0, number=0, a=0, b=0):
        self._append(_pack(_now(), kind, flags, number & 0xFFFFFFFF, a, b))

    def write_named(self, kind, text, flags=0, number=0, b=0):
        """Write a record whose `a` is a text."""
        self.write(kind, flags, number, self._name(text), b)

    def prepared(self, samples, batch):
        """Write the preparation times of a batch, each as (wall, CPU, without a CPU): for loading
        its samples and for collating them."""
        now = _now()
        self._append(
            _pack(now, PREPARED, 0, samples[2] // 1000 & 0xFFFFFFFF, samples[0], samples[1])
            + _pack(now, COLLATED, 0, batch[2] // 1000 & 0xFFFFFFFF, batch[0], batch[1])
        )

    def mark(self, kind, text, value, flags=0):
        """Write a mark or the edge of a phase, with any name and value."""
        try:
            if value is None or isinstance(value, (bool, int, float)):
                shape, number = encode_value(value)
            else:
                shape, number = VALUE_TEXT, self._name(str(value), str(text))
            self.write_named(kind, str(text), shape | flags, b=number)
        except Exception:  # an object without a working __str__
            pass

    def seen(self, framework, version):
        self.write_named(SEEN, framework, b=self._name(str(version)))

    def update_rank(self):
        """Write the rank if it became known only after the start, as with mp.spawn."""
        rank = _rank()
        if rank != self._rank:
            self._rank = rank
            self.write(RANK, a=rank)

    def gpu_memory(self, device, uuid, memory, peak, retries):
        """Write the allocator statistics of a CUDA device; unchanged peaks and retries are not
        repeated."""
        if device not in self._gpus:
            self._gpus[device] = None
            self.write_named(GPU, uuid, number=device)
        self.write(GPU_MEMORY, 0, device, *memory)
        if self._gpus[device] != (peak, retries):
            self._gpus[device] = (peak, retries)
            self.write(GPU_PEAK, 0, device, *peak)
            self.write(GPU_RETRIES, 0, device, *retries)

    def release_gpus(self):
        """Write that the process holds no GPU memory any more."""
        for device in self._gpus:
            self.write(GPU_MEMORY, 0, device)

    def close(self):
        if self._is_open():
            os.close(self._fd)
        self._fd = -1

    def reset(self):
        """Start over, in a forked child. It opens its own file with its first record."""
        self._fd = -1
        self._started = False
        self._ids = {}
        self._gpus = {}
        self._buffer = b""
        self._dropped = 0

    def _name(self, text, name=""):
        """Return the id of a text, and write the text, with credentials masked, if it is new.
        `name` is that of the mark whose value it is."""
        key = (name, text) if name else text
        ident = self._ids.get(key)
        if ident is None:
            masked = _mask(text[:_MAX_TEXT], name)
            ident = name_id(masked)
            if len(self._ids) >= _MAX_NAMES:
                self._ids.clear()
            self._ids[key] = ident
            self._append(name_records(masked))
        return ident

    def _append(self, data):
        try:
            start = b"" if self._is_open() else self._open()
            if start or self._buffer:
                data, self._buffer = start + self._buffer + data, b""
            written = _write(self._fd, data)
        except OSError:
            self._keep(data)
            return
        if written != len(data):
            self._truncate()
            self._keep(data[written // SIZE * SIZE :])
        elif self._dropped:
            dropped, self._dropped = self._dropped, 0
            self.write(DROPPED, a=dropped)

    def _is_open(self):
        """Return whether the descriptor is still that of our file.

        A script may close all descriptors and open its own files, which must not be written to.
        """
        if self._fd < 0:
            return False
        try:
            now = os.fstat(self._fd)
        except OSError:
            return False
        return now.st_ino == self._file.st_ino and now.st_dev == self._file.st_dev

    def _open(self):
        """Open the file, and return its first record if it is new."""
        path = os.path.join(self.folder, self._file_name or "%d.bin" % os.getpid())
        # The folder may belong to another user: never write to a link or wait for a FIFO.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = open_high(path, flags)
        self._file = os.fstat(self._fd)
        if self._file.st_nlink > 1:
            self.close()
            raise OSError("a link to another file")
        if self._started:
            return b""
        self._started = True
        self._rank = _rank()
        return _pack(_now(), START, 0, os.getppid(), self._rank, sys.hexversion)

    def _keep(self, data):
        """Keep records that cannot be written, because the disk is full or the folder is gone, up
        to a limit, and count the rest."""
        space = _MAX_BUFFERED - len(self._buffer)
        self._buffer += data[:space]
        if len(data) > space:
            self._dropped += (len(data) - space) // SIZE
            self._ids.clear()

    def _truncate(self):
        """Remove a partially written record (full disk), so that records stay aligned."""
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
    """Open a file with a descriptor number that scripts do not use (see `_FD_DISTANCE`)."""
    import resource

    low = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        number = max(3, (soft if 0 <= soft <= 1024 else 1024) - _FD_DISTANCE)
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, number)
    except OSError:
        return low
    os.close(low)
    return high


current = None
"""The writer of this process, or None if it is not monitored."""


def report_to(folder):
    """Report to a folder, or stop reporting if it is None. Return the previous writer."""
    return report_with(Writer(folder) if folder else None)


def report_with(writer):
    """Report with this writer. Return the previous one."""
    global current
    before, current = current, writer
    return before


def _after_fork():
    if current is not None:
        current.reset()


os.register_at_fork(after_in_child=_after_fork)
report_to(os.environ.get(FOLDER_VARIABLE))

# The hook loads this file by path, and a script that sets marks imports it from the package. Both
# use the module that was loaded first, so that a process has only one writer.
sys.modules.setdefault("_stepscope_events", sys.modules[__name__])
