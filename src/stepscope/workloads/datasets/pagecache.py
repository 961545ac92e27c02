"""Files in the page cache: out of it, into it, and how much of them is there.

Without root. What a directory holds and the sizes of files stay known to the kernel: only what is
in the files is read anew.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_SAMPLE = 2000
"""Files that are looked at: a share of a million is known well enough from these."""
_CHUNK = 1 << 20


def evict(files: Iterable[Path]) -> None:
    """Let the kernel forget what is in the files. It keeps what was not written back yet."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(files: Iterable[Path]) -> None:
    """Read the files, so that they are in memory as far as that goes."""
    buffer = bytearray(_CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident_share(files: Sequence[Path]) -> float | None:
    """The part of the files' pages that is in memory; None where the kernel will not tell."""
    resident = pages = 0
    for path in files[:: max(1, len(files) // _SAMPLE)]:
        counted = _resident_pages(path)
        if counted is None:
            return None
        resident, pages = resident + counted[0], pages + counted[1]
    return resident / pages if pages else None


def _resident_pages(path: Path) -> tuple[int, int] | None:
    """Pages in memory, and pages. Of files that are not the user's the kernel says "all" to any
    question (since Linux 5.2): that is no answer."""
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        if os.geteuid() not in (0, facts.st_uid) and not os.access(path, os.W_OK):
            return None
        if not facts.st_size:
            return 0, 0
        with mmap.mmap(file.fileno(), facts.st_size, prot=mmap.PROT_READ) as mapped:
            content = np.frombuffer(mapped, np.uint8)
            flags = np.zeros(-(-len(content) // mmap.PAGESIZE), np.uint8)
            failed = _LIBC.mincore(
                ctypes.c_void_p(content.ctypes.data),
                ctypes.c_size_t(len(content)),
                ctypes.c_void_p(flags.ctypes.data),
            )
            del content  # the map cannot be closed while something looks into it
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(np.count_nonzero(flags & 1)), len(flags)


_LIBC = ctypes.CDLL(None, use_errno=True)
