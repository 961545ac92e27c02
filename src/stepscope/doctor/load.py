"""The load of the self-test: does things of known size, one after the other, and tells them.

Run by the doctor under watch, with a JSON object: `disk` (a folder, or null), `filesystem` (what
that folder is on), `gpu` and `quick`.
Between tasks it rests, so that the windows of the sensors around one do not hold another.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from stepscope.doctor import tasks
from stepscope.doctor.tasks import MarkValue
from stepscope.marks import mark, phase
from stepscope.sensors import procfs
from stepscope.sensors.tree import LOADER_WORKER

_MIB = 1 << 20
_PAGE = 4096
_REST_S = 0.35
_LONG_REST_S = 0.8
"""Between a task that is judged by its CPU time and one that takes some: on a busy machine a
reading comes late, and then holds what was done since the last one."""
_BURN_S = 1.5
_LONGEST_S = 6.0
"""After so long a burn ends, whatever it got of a busy machine."""
_HOLD_S = 1.2
"""Longer than the period of the sensors that shall see it."""
_GPU_REST_S = 2.5
"""Longer than the period of the slowest GPU sensor: no window of it holds two tasks."""
_GPU_S = 2.0
_MEMORY = 256 * _MIB
_DISK = 64 * _MIB
_SHM = 64 * _MIB
_LOOPBACK = 64 * _MIB
_SHM_FOLDER = "/dev/shm"
"""What PyTorch calls its loader workers: by this name they are given their role."""

Act = Callable[[], "dict[str, MarkValue] | float | None"]


class Skip(Exception):
    """A task cannot be done here; the text says why."""


def main() -> None:
    spec = json.loads(sys.argv[1])
    if spec["quick"]:
        _do(tasks.IDLE, lambda: time.sleep(1.2))
        _do(tasks.BURN, lambda: burn(0.2))
        return
    disk, place = spec["disk"], {"place": spec["filesystem"]}
    with contextlib.ExitStack() as kept:
        file = kept.enter_context(tempfile.TemporaryFile(dir=disk, buffering=0)) if disk else None
        # Tasks that one sensor could mix up do not follow each other. What is read rarely is not
        # the last: nothing is known of the end of a run that no sensor saw.
        plan: list[tuple[str, Act, float]] = [
            (tasks.IDLE, lambda: time.sleep(1.0), _REST_S),
            (tasks.BURN, lambda: burn(_BURN_S), _LONG_REST_S),
            (tasks.SHM, fill_shm, _REST_S),
            (tasks.LOOPBACK, send_to_self, _REST_S),
            (tasks.MEMORY, hold_memory, _REST_S),
            (tasks.WRITE, lambda: {"amount": write(file), **place}, _LONG_REST_S),
            (tasks.WORKER, burn_in_worker, _LONG_REST_S),
            (tasks.READ, lambda: {"amount": read_back(file), **place}, _REST_S),
        ]
        for name, act, rest_s in plan:
            _do(name, act, rest_s)
    done, reason = len(plan), "the GPU was left out, as asked"
    if spec["gpu"]:
        from stepscope.doctor.gpu_load import GpuLoad, GpuUntestable

        try:
            gpu = GpuLoad(_GPU_S)
        except (GpuUntestable, RuntimeError) as error:  # the latter of a framework that fails
            reason = str(error)
        else:
            reason = ""
            for name, act in gpu.tasks().items():
                _do(name, act, _GPU_REST_S)
            done += len(tasks.GPU_TASKS)
            mark(f"{tasks.GPU_IDLE}.uuid", gpu.uuid)
    if reason:
        for name in tasks.GPU_TASKS:
            mark(f"{name}.skipped", reason)
    mark(f"{tasks.LOAD}.tasks", done)


def _do(name: str, act: Act, rest_s: float = _REST_S) -> None:
    """One task as a phase; what `act` returns becomes marks, a number is its amount."""
    try:
        with phase(name):
            facts = act()
    except (Skip, RuntimeError) as reason:  # the latter of a framework, out of memory perhaps
        facts = {"skipped": str(reason)}
    if isinstance(facts, float | int):
        facts = {"amount": facts}
    for what, value in (facts or {}).items():
        mark(f"{name}.{what}", value)
    time.sleep(rest_s)


def burn(core_seconds: float) -> float:
    """Keep one core busy; the core-seconds that this took by our own clock."""
    start, give_up = time.process_time(), time.monotonic() + _LONGEST_S
    while time.process_time() < start + core_seconds and time.monotonic() < give_up:
        pass
    return time.process_time() - start


def burn_in_worker() -> float:
    """The same in a child that is called as a loader worker is."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        procfs.set_own_name(LOADER_WORKER)
        burn(_BURN_S)
        os.write(sink, str(time.process_time()).encode())
        os._exit(0)
    os.close(sink)
    os.waitpid(child, 0)
    with os.fdopen(source) as seconds:
        return float(seconds.read())


def hold_memory() -> int:
    """Touch every page of some memory and keep it for a while."""
    data = bytearray(_MEMORY)
    for place in range(0, _MEMORY, _PAGE):
        data[place] = 1
    time.sleep(_HOLD_S)
    return len(data)


def fill_shm() -> int:
    """Keep a file in /dev/shm for a while: as much as fits easily."""
    try:
        found = os.statvfs(_SHM_FOLDER)
        size = min(_SHM, found.f_bavail * found.f_frsize // 4 // _MIB * _MIB)
        if not size:
            raise Skip(f"{_SHM_FOLDER} is full, or has no size")
        with tempfile.TemporaryFile(dir=_SHM_FOLDER, buffering=0) as file:
            _fill(file, size)
            time.sleep(_HOLD_S)
    except OSError as error:
        raise Skip(f"{_SHM_FOLDER}: {error.strerror}") from None
    return size


def write(file: BinaryIO | None) -> int:
    """Write to the disk, to the end."""
    if file is None:
        raise Skip("no folder that can be written to is on a disk")
    try:
        _fill(file, _DISK)
        os.fsync(file.fileno())
    except OSError as error:
        raise Skip(f"the disk could not be written to: {error.strerror}") from None
    return _DISK


def read_back(file: BinaryIO | None) -> int:
    """Read it from the disk, after the page cache was told to forget it."""
    if file is None:
        raise Skip("no folder that can be written to is on a disk")
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _share_cached(file.fileno()) > 0.05:
        raise Skip("the file stays in the page cache")
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    done = 0
    while data := os.read(file.fileno(), _MIB):
        done += len(data)
    if not done:
        raise Skip("nothing had been written")
    return done


def send_to_self() -> int:
    """Send bytes over a socket on the loopback interface."""

    def receive() -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(_MIB):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = threading.Thread(target=receive)
        receiver.start()
        with socket.create_connection(server.getsockname()) as connection:
            for _ in range(_LOOPBACK // _MIB):
                connection.sendall(bytes(_MIB))
        receiver.join()
    return _LOOPBACK


def _fill(file: BinaryIO, size: int) -> None:
    chunk = os.urandom(_MIB)
    for _ in range(size // _MIB):
        os.write(file.fileno(), chunk)


def _share_cached(descriptor: int) -> float:
    """Share of a file that can be read without waiting for the disk, from a few looks at it."""
    looks, hits = 64, 0
    for number in range(looks):
        try:
            place = number * (_DISK // looks)
            hits += os.preadv(descriptor, [bytearray(_PAGE)], place, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            pass
        except OSError:  # a file system that cannot tell
            return 0.0
    return hits / looks
