"""Damage to the files of a folder: by accident, or by somebody who wants to harm its reader."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzzing.documents import hostile_design, hostile_json, hostile_ledger
from fuzzing.events import hostile_events, hostile_steps
from fuzzing.samples import hostile_samples

MIB = 1 << 20
NAMES = (
    b"\x1b[31mred\x1b]0;owned\x07",
    b"two\nlines",
    b"\xff\xfe",
    b"\xc2\x9b31m",
    b"<script>alert(1)",
    b"a" * 240,
)
"""Names of files that control a terminal, are not UTF-8, or are HTML."""


@dataclass(frozen=True)
class Scene:
    """A folder to damage, and what is around it."""

    folder: Path
    outside: Path
    """An intact folder of the same kind that nothing may read or change."""
    bombs: Path
    """Where files that expand when they are read are kept: they take long to make."""


def damage(scene: Scene, rng: random.Random) -> list[str]:
    """Damage one to five things. Return what was done."""
    return [_damage_one(scene, rng) for _ in range(rng.choice((1, 1, 2, 3, 5)))]


def _damage_one(scene: Scene, rng: random.Random) -> str:
    paths = _paths_in(scene.folder)
    if not paths:
        return "nothing is left"
    # By kind, because a study has many files of some kinds.
    kinds = sorted({_kind(path) for path in paths})
    kind = rng.choice(kinds)
    path = rng.choice([each for each in paths if _kind(each) == kind])
    name = path.relative_to(scene.folder)
    if not _is_usual(path):
        return f"{name}: already replaced"
    if path.is_dir():
        action = rng.choice(_OF_FOLDERS)
    elif rng.random() < 0.5 and (rewritten := _rewrite(path, scene, rng)):
        return f"{name}: {rewritten}"
    else:
        action = rng.choice(_OF_FILES)
    action(path, scene, rng)
    return f"{name}: {action.__name__}"


def _rewrite(path: Path, scene: Scene, rng: random.Random) -> str:
    """Write hostile contents of the right format. Return an empty text if there are none."""
    match path.suffix:
        case ".parquet" | ".arrows":
            return hostile_samples(path, scene.bombs, rng)
        case ".json" | ".claim" | ".lock":
            return hostile_json(path, rng)
        case ".jsonl":
            return hostile_ledger(path, rng)
        case ".yaml":
            return hostile_design(path, rng)
        case ".bin":
            return (hostile_steps if path.parent.name == "trial" else hostile_events)(path, rng)
    return ""


def _paths_in(folder: Path) -> list[Path]:
    """Return all files and folders, except those in folders without permissions."""
    found, remaining = [], [folder]
    while remaining:
        inside = list(remaining.pop().iterdir())
        found += inside
        remaining += [path for path in inside if path.is_dir() and _is_usual(path)]
    return sorted(found)


def _is_usual(path: Path) -> bool:
    """Return whether it is a small file or a folder that can be damaged further."""
    status = path.lstat()
    is_usual = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_usual and status.st_size < MIB and status.st_mode & stat.S_IRUSR > 0


def _kind(path: Path) -> str:
    return f"{path.is_dir()} {re.sub('[0-9a-f]*[0-9]+', '0', path.name)}"


def flip_bits(path: Path, scene: Scene, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 30)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def overwrite(path: Path, scene: Scene, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    begin = rng.randrange(len(data) + 1)
    new = rng.choice((rng.randbytes, bytes, lambda n: b"\xff" * n))(rng.choice((1, 8, 64, 4096)))
    data[begin : begin + len(new)] = new
    path.write_bytes(data)


def remove_bytes(path: Path, scene: Scene, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    begin = rng.randrange(len(data) + 1)
    del data[begin : begin + rng.choice((1, 7, 32, 1000))]
    path.write_bytes(data)


def cut(path: Path, scene: Scene, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def extend(path: Path, scene: Scene, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data + rng.choice((bytes(5000), rng.randbytes(5000), data, b"\n" * 100_000)))


def empty(path: Path, scene: Scene, rng: random.Random) -> None:
    path.write_bytes(b"")


def replace_by_noise(path: Path, scene: Scene, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice((1, 100, 50_000))))


def replace_by_other(path: Path, scene: Scene, rng: random.Random) -> None:
    """Swap two files."""
    files = [each for each in _paths_in(scene.folder) if each.is_file() and _is_usual(each)]
    other = rng.choice(files)
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)


def remove(path: Path, scene: Scene, rng: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def lock_out(path: Path, scene: Scene, rng: random.Random) -> None:
    """Remove all permissions, which do not stop root."""
    path.chmod(0)


def link_to_same(path: Path, scene: Scene, rng: random.Random) -> None:
    """Link to the same file or folder of another one."""
    target = scene.outside / path.relative_to(scene.folder)
    remove(path, scene, rng)
    path.symlink_to(target if rng.random() < 0.5 else os.path.relpath(target, path.parent))


def link_to_secret(path: Path, scene: Scene, rng: random.Random) -> None:
    remove(path, scene, rng)
    path.symlink_to(scene.outside / "secret.txt")


def link_to_device(path: Path, scene: Scene, rng: random.Random) -> None:
    remove(path, scene, rng)
    path.symlink_to(rng.choice(("/dev/zero", "/dev/tty", "/proc/self/mem", "/dev/fd/0")))


def link_to_nothing(path: Path, scene: Scene, rng: random.Random) -> None:
    remove(path, scene, rng)
    path.symlink_to(rng.choice((scene.outside / "new", path, Path("..") / path.parent.name)))


def link_to_folder(path: Path, scene: Scene, rng: random.Random) -> None:
    remove(path, scene, rng)
    path.symlink_to(rng.choice((scene.outside, path.parent, Path("/"))))


def make_fifo(path: Path, scene: Scene, rng: random.Random) -> None:
    remove(path, scene, rng)
    os.mkfifo(path)


def make_socket(path: Path, scene: Scene, rng: random.Random) -> None:
    remove(path, scene, rng)
    listening = socket.socket(socket.AF_UNIX)
    short = scene.outside.parent / "socket"  # the address of a socket has at most 107 bytes
    listening.bind(str(short))
    listening.close()
    os.rename(short, path)


def make_folder(path: Path, scene: Scene, rng: random.Random) -> None:
    remove(path, scene, rng)
    path.mkdir()
    (path / "run.json").write_text("{}")


def make_file(path: Path, scene: Scene, rng: random.Random) -> None:
    remove(path, scene, rng)
    path.write_bytes(rng.randbytes(100))


def make_sparse(path: Path, scene: Scene, rng: random.Random) -> None:
    os.truncate(path, rng.choice((3072 * MIB, 200 * MIB)))


def make_deep(path: Path, scene: Scene, rng: random.Random) -> None:
    """Nest folders deeper than a recursive function can follow."""
    for _ in range(600):
        path /= "d"
    with contextlib.suppress(OSError):  # it is deeper than a path can be
        path.mkdir(parents=True, exist_ok=True)


def add_names(path: Path, scene: Scene, rng: random.Random) -> None:
    """Copy the files of a folder to hostile names."""
    for file in sorted(each for each in path.iterdir() if each.is_file() and _is_usual(each)):
        name = rng.choice(NAMES)
        begin, end = rng.choice(((b"", file.suffix.encode()), (os.fsencode(file.stem), b"")))
        with contextlib.suppress(shutil.SameFileError):
            shutil.copy(file, os.path.join(os.fsencode(path), (begin + name)[:240] + end))


def rename(path: Path, scene: Scene, rng: random.Random) -> None:
    with contextlib.suppress(OSError):  # a folder has this name already
        os.rename(path, os.path.join(os.fsencode(path.parent), rng.choice(NAMES)))


_Action = Callable[[Path, Scene, random.Random], None]
_OF_BOTH: tuple[_Action, ...] = (
    remove,
    lock_out,
    link_to_same,
    link_to_secret,
    link_to_device,
    link_to_nothing,
    link_to_folder,
    make_fifo,
    make_socket,
    rename,
)
_OF_FILES: tuple[_Action, ...] = (
    flip_bits,
    flip_bits,
    overwrite,
    overwrite,
    remove_bytes,
    cut,
    cut,
    extend,
    empty,
    replace_by_noise,
    replace_by_other,
    make_folder,
    make_sparse,
    *_OF_BOTH,
)
_OF_FOLDERS: tuple[_Action, ...] = (make_file, make_deep, add_names, add_names, *_OF_BOTH)
