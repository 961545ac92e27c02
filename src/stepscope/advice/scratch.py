"""Folders for what probes write, which go even where nobody was left to remove them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import zlib
from pathlib import Path


def swept_folder(prefix: str) -> Path:
    """A new temporary folder. Before, those go which processes of this user left when they were
    killed: each has the process in its name, `stepscope-fit-<pid>-…`."""
    _sweep(Path(tempfile.gettempdir()), prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-{_place()}-"))


def _sweep(inside: Path, prefix: str) -> None:
    named = re.compile(rf"{re.escape(prefix)}(\d+)-{_place()}-\w+")
    for folder in inside.glob(f"{prefix}*"):
        found = named.fullmatch(folder.name)
        if found and not Path("/proc", found[1]).exists() and _is_own(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:  # another one sweeps, too
        return False


def _place() -> str:
    """Where a number means the same process: machines and containers may share a folder."""
    return f"{zlib.crc32(f'{socket.gethostname()} {_namespace()}'.encode()):08x}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
