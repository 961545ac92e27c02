"""The load of the self-test: runs tasks of known size, one after the other, and reports them.

The doctor runs and monitors it with a JSON object as its argument: `disk` (a folder or null),
`filesystem` (of that folder), `gpu` and `quick`. It pauses between tasks, so that a window of a
sensor does not overlap two tasks.
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
_PAUSE_S = 0.35
_LONG_PAUSE_S = 0.8
"""Pause between a task whose CPU time is checked and another that uses CPU time: on a busy machine
a reading may be late and include both."""
_BURN_S = 1.5
_BURN_TIMEOUT_S = 6.0
"""A burn ends after this time even if a busy machine gave it less CPU time."""
_HOLD_S = 1.2
"""Longer than the period of the sensors that measure it."""
_GPU_PAUSE_S = 2.5
"""Longer than the period of the slowest GPU sensor, so that no window overlaps two tasks."""
_GPU_S = 2.0
_MEMORY = 256 * _MIB
_DISK = 64 * _MIB
_SHM = 64 * _MIB
_LOOPBACK = 64 * _MIB
_SHM_FOLDER = "/dev/shm"

Act = Callable[[], "dict[str, MarkValue] | float | None"]


class Skip(Exception):
    """A task is not possible on this machine. The text is the reason."""


def main() -> None:
    spec = json.loads(sys.argv[1])
    if spec["quick"]:
        _do(tasks.IDLE, lambda: time.sleep(1.2))
        _do(tasks.BURN, lambda: burn(0.2))
        return
    disk, place = spec["disk"], {"place": spec["filesystem"]}
    with contextlib.ExitStack() as kept:
        file = kept.enter_context(tempfile.TemporaryFile(dir=disk, buffering=0)) if disk else None
        # Tasks that a sensor could confuse do not follow each other. A task that is measured rarely
        # is not the last one, because the end of the run may have no reading.
        plan: list[tuple[str, Act, float]] = [
            (tasks.IDLE, lambda: time.sleep(1.0), _PAUSE_S),
            (tasks.BURN, lambda: burn(_BURN_S), _LONG_PAUSE_S),
            (tasks.SHM, fill_shm, _PAUSE_S),
            (tasks.LOOPBACK, send_to_self, _PAUSE_S),
            (tasks.MEMORY, hold_memory, _PAUSE_S),
            (tasks.WRITE, lambda: {"amount": write(file), **place}, _LONG_PAUSE_S),
            (tasks.WORKER, burn_in_worker, _LONG_PAUSE_S),
            (tasks.READ, lambda: {"amount": read_back(file), **place}, _PAUSE_S),
        ]
        for name, act, pause_s in plan:
            _do(name, act, pause_s)
    done, reason = len(plan), "disabled by `--no-gpu`"
    if spec["gpu"]:
        from stepscope.doctor.gpu_load import GpuLoad, GpuUntestable

        try:
            gpu = GpuLoad(_GPU_S)
        except (GpuUntestable, RuntimeError) as error:  # RuntimeError: the framework fails
            reason = str(error)
        else:
            reason = ""
            for name, act in gpu.tasks().items():
                _do(name, act, _GPU_PAUSE_S)
            done += len(tasks.GPU_TASKS)
            mark(f"{tasks.GPU_IDLE}.uuid", gpu.uuid)
    if reason:
        for name in tasks.GPU_TASKS:
            mark(f"{name}.skipped", reason)
    mark(f"{tasks.LOAD}.tasks", done)


def _do(name: str, act: Act, pause_s: float = _PAUSE_S) -> None:
    """Run a task as a phase. `act` returns its facts, or its amount as a number."""
    try:
        with phase(name):
            facts = act()
    except (Skip, RuntimeError) as reason:  # RuntimeError: the framework fails, e.g. out of memory
        facts = {"skipped": str(reason)}
    if isinstance(facts, float | int):
        facts = {"amount": facts}
    for fact, value in (facts or {}).items():
        mark(f"{name}.{fact}", value)
    time.sleep(pause_s)


def burn(core_seconds: float) -> float:
    """Keep one core busy; return the CPU time used, by our own clock."""
    start, give_up = time.process_time(), time.monotonic() + _BURN_TIMEOUT_S
    while time.process_time() < start + core_seconds and time.monotonic() < give_up:
        pass
    return time.process_time() - start


def burn_in_worker() -> float:
    """Burn in a child process with the name of a loader worker."""
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
    """Touch every page of a block of memory and hold it for a while."""
    data = bytearray(_MEMORY)
    for offset in range(0, _MEMORY, _PAGE):
        data[offset] = 1
    time.sleep(_HOLD_S)
    return len(data)


def fill_shm() -> int:
    """Hold a file in /dev/shm for a while, at most a quarter of the free space."""
    try:
        status = os.statvfs(_SHM_FOLDER)
        size = min(_SHM, status.f_bavail * status.f_frsize // 4 // _MIB * _MIB)
        if not size:
            raise Skip(f"{_SHM_FOLDER} is full or has no size limit")
        with tempfile.TemporaryFile(dir=_SHM_FOLDER, buffering=0) as file:
            _fill(file, size)
            time.sleep(_HOLD_S)
    except OSError as error:
        raise Skip(f"{_SHM_FOLDER}: {error.strerror}") from None
    return size


def write(file: BinaryIO | None) -> int:
    """Write to the disk and sync."""
    if file is None:
        raise Skip("found no writable folder on a disk")
    try:
        _fill(file, _DISK)
        os.fsync(file.fileno())
    except OSError as error:
        raise Skip(f"cannot write to the disk: {error.strerror}") from None
    return _DISK


def read_back(file: BinaryIO | None) -> int:
    """Drop the file from the page cache and read it from the disk."""
    if file is None:
        raise Skip("found no writable folder on a disk")
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _share_cached(file.fileno()) > 0.05:
        raise Skip("the file stays in the page cache")
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    done = 0
    while data := os.read(file.fileno(), _MIB):
        done += len(data)
    if not done:
        raise Skip("the file is empty")
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
    """Return the share of sampled pages that can be read without waiting for the disk."""
    samples, hits = 64, 0
    for number in range(samples):
        try:
            offset = number * (_DISK // samples)
            hits += os.preadv(descriptor, [bytearray(_PAGE)], offset, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            pass
        except OSError:  # not supported by the file system
            return 0.0
    return hits / samples
