"""Open, read and replace files in folders that may be untrusted.

A run or study folder may contain anything: links to other folders, FIFOs, devices, huge files. Only
regular files of a limited size are opened, and no link below `root`, the run or study folder, is
followed. By default `root` is the folder that contains the file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stepscope.errors import RunFolderError
from stepscope.records.codec import dumps, parse

MIB = 1 << 20
JSON_LIMIT = 4 * MIB
LINES_LIMIT = 256 * MIB
"""A ledger, with a line for each trial."""
STREAM_LIMIT = 256 * MIB
"""A segment of samples. A stream is closed at 16 MiB, but not while the disk is full."""
EVENTS_LIMIT = 4096 * MIB
"""The events of one process: more than 100 million records."""

STEPS_LIMIT = 256 * MIB
"""The steps of all ranks of a trial: about 5 million."""

_SPARSE_RATIO = 32
"""Size of a file over its blocks on disk. Compressing file systems store samples and events in
about a tenth of their size."""
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeFile(RunFolderError):
    """A file of a run or study folder that is not a regular file of a limited size."""


def open_regular(path: Path, limit: int, root: Path | None = None) -> BinaryIO:
    """Open a regular file of at most `limit` bytes.

    Raises FileNotFoundError if it does not exist, and UnsafeFile if it is anything else or cannot
    be opened.
    """
    try:
        with _folder_of(path, root) as folder:
            # Opening a FIFO would otherwise wait for a writer.
            flags = os.O_RDONLY | os.O_NONBLOCK | _NO_LINK
            descriptor = os.open(path.name, flags, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        refuse_link(path)
        raise UnsafeFile(f"{path} cannot be opened: {error.strerror}") from None
    status = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a regular file"
    elif status.st_size > limit:
        problem = f"is {status.st_size / MIB:,.0f} MiB; the limit is {limit // MIB} MiB"
    elif status.st_size > _SPARSE_RATIO * max(512 * status.st_blocks, MIB):
        problem = f"is a sparse file: {status.st_size / MIB:,.0f} MiB with almost no data"
    if not problem:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UnsafeFile(f"{path} {problem}", "The folder is damaged or was tampered with")


def read_regular(path: Path, limit: int, root: Path | None = None) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes."""
    with open_regular(path, limit, root) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_json(path: Path, root: Path | None = None) -> Any:
    """Return the contents of a JSON file; raises ValueError if it is invalid."""
    return parse(read_regular(path, JSON_LIMIT, root))


def entries_in(folder: Path, root: Path | None = None) -> list[os.DirEntry[str]]:
    """Return the contents of a folder, sorted by name; none if it does not exist. With `root`, no
    link below it is followed, and the entries have no `path`."""
    try:
        with contextlib.ExitStack() as stack:
            opened = folder if root is None else stack.enter_context(_folder_of(folder / "_", root))
            entries = stack.enter_context(os.scandir(opened))
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnsafeFile(f"{folder} cannot be opened: {error.strerror}") from None


def replace_atomically(
    path: Path, content: str | bytes | memoryview, root: Path | None = None
) -> None:
    """Write a file so that readers see either the old or the new contents, never a part."""
    with _folder_of(path, root) as folder:
        data = content.encode("utf-8", "replace") if isinstance(content, str) else content
        temporary = f".{path.name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
        descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise


def write_json(path: Path, record: Any, indent: int | None = 1, root: Path | None = None) -> None:
    """Replace a JSON file with this record. Read it with `records.codec.loads`."""
    replace_atomically(path, dumps(record, indent=indent) + "\n", root)


def open_own(path: Path, flags: int, root: Path | None = None) -> int:
    """Open a file to write or lock it, and create it if necessary; raises UnsafeFile if it is a
    link or not a regular file."""
    with _folder_of(path, root) as folder:
        try:
            flags |= os.O_CREAT | os.O_NONBLOCK | _NO_LINK
            descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
        except OSError:
            refuse_link(path)
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeFile(f"{path} is not a regular file", "Remove it")
    return descriptor


def refuse_link(path: Path) -> None:
    """Raise UnsafeFile if a file or folder is a link."""
    if os.path.islink(path):
        raise UnsafeFile(
            f"{path} is a symbolic link",
            "Links in run and study folders are not allowed. Replace it with the file or folder",
        )


@contextlib.contextmanager
def _folder_of(path: Path, root: Path | None) -> Iterator[int]:
    """Open the folder of a file, without following links below `root`."""
    place = path.parent if root is None else root
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.parent.relative_to(place).parts:
            place /= name
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK, dir_fd=folder)
            except OSError:
                refuse_link(place)
                raise
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)
