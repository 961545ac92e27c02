"""Time the preparation of batches, also in loader workers: loading samples, then collating them.

Each part is measured as wall time, CPU time and time that the thread was ready to run without a
CPU. In the rest of the wall time it was blocked by storage, the network or a lock. Standard library
only.
"""

import functools
import os
import sys
import threading
import time

events = sys.modules["_stepscope_events"]

_now = time.monotonic_ns
_cpu_now = getattr(time, "thread_time_ns", None)


def patch(module):
    """Time both kinds of fetchers, which run in loader workers or in the main process."""
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        if not getattr(kind.fetch, "_stepscope", False):
            kind.fetch = _timed_fetch(kind.fetch)
    return ""


_PENDING = object()
COST_FACTOR = 1000
_MAX_INTERVAL_NS = 250_000_000
"""Timing a fetch takes about ten microseconds. If batches take less than a thousand times as long,
only some of them are timed."""


def _timed_fetch(fetch):
    due = [0]

    def timed_fetch(self, possibly_batched_index):
        writer = events.current
        if writer is None or _now() < due[0] or _cpu_now is None:
            return fetch(self, possibly_batched_index)
        collation = _collation_start(self)
        started, collation[0] = _clocks(), _PENDING
        batch = fetch(self, possibly_batched_index)
        collating, collation[0] = collation[0], None
        if collating is not _PENDING:
            done = _clocks()
            _worker_writer(writer).prepared(_elapsed(started, collating), _elapsed(collating, done))
            due[0] = _now() + min(_MAX_INTERVAL_NS, COST_FACTOR * (_now() - done[0]))
        return batch

    timed_fetch._stepscope = True
    return functools.update_wrapper(timed_fetch, fetch)


_worker_writers = {}


def _worker_writer(writer):
    """Return the writer for a loader worker. There may be thousands of workers, so the workers of
    one parent share a file."""
    try:
        key = writer.folder, os.getpid()
        own = _worker_writers.get(key)
        if own is None:
            worker = sys.modules["torch.utils.data._utils.worker"].get_worker_info()
            shared = events.Writer(writer.folder, "workers-%d.bin" % os.getppid())
            own = _worker_writers[key] = writer if worker is None else shared
        return own
    except Exception:
        return writer


def _collation_start(fetcher):
    """Return a list whose item is set to the clocks when the fetcher starts to collate."""
    start = getattr(fetcher, "_stepscope", None)
    if start is None:
        start = fetcher._stepscope = [None]
        collate = fetcher.collate_fn

        def timed_collate(data):
            if start[0] is _PENDING:
                start[0] = _clocks()
            return collate(data)

        fetcher.collate_fn = timed_collate
    return start


def _clocks():
    """Return the time, the CPU time of this thread, and its time ready to run without a CPU."""
    return _now(), _cpu_now(), _cpu_wait()


def _elapsed(before, after):
    return tuple(max(0, after[i] - before[i]) for i in range(3))


_schedstat = {}
"""Descriptors of /proc/PID/task/TID/schedstat, by process and thread."""


def _cpu_wait():
    key = os.getpid(), threading.get_ident()
    try:
        fd = _schedstat.get(key)
        if fd is None:
            native = threading.get_native_id() if hasattr(threading, "get_native_id") else key[0]
            fd = events.open_high("/proc/%d/task/%d/schedstat" % (key[0], native))
            _schedstat[key] = fd
        return int(os.pread(fd, 96, 0).split()[1]) if fd >= 0 else 0
    except Exception:  # not in this kernel, or the descriptor was closed and reused
        _schedstat[key] = -1
        return 0
