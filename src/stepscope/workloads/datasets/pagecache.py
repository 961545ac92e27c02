"""Evict files from the page cache, read them into it, and measure how much of them is cached.

It does not need root. The kernel keeps directory entries and file sizes cached: only the contents
of evicted files are read from disk again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_SAMPLE = 2000
"""Number of files to check: enough for the share of a million files."""
_CHUNK = 1 << 20


def evict(files: Iterable[Path]) -> None:
    """Evict the contents of the files. The kernel keeps pages that are not written back yet."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(files: Iterable[Path]) -> None:
    """Read the files, so that they are cached as far as memory permits."""
    buffer = bytearray(_CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident_share(files: Sequence[Path]) -> float | None:
    """The share of the files' pages that is in memory; None if the kernel does not report it."""
    resident = pages = 0
    for path in files[:: max(1, len(files) // _SAMPLE)]:
        counted = _resident_pages(path)
        if counted is None:
            return None
        resident, pages = resident + counted[0], pages + counted[1]
    return resident / pages if pages else None


def _resident_pages(path: Path) -> tuple[int, int] | None:
    """Pages in memory, and all pages.

    None for a file that the user does not own: since Linux 5.2 the kernel reports all its pages as
    resident.
    """
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
            del content  # the mapping cannot be closed while a view exists
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(np.count_nonzero(flags & 1)), len(flags)


_LIBC = ctypes.CDLL(None, use_errno=True)
