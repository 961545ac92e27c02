"""How long batches take to prepare: their samples, then putting them together, in workers too.

By the clock, of CPU, and without a CPU although it was ready: what is left stood still, for
storage, the network or a lock. Standard library only.
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
    """Both ways to fetch a batch, in workers and without: first the samples, then the collation."""
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        if not getattr(kind.fetch, "_stepscope", False):
            kind.fetch = _timed_fetch(kind.fetch)
    return ""


_WANTED = object()
TIMES_COST = 1000
_RAREST_NS = 250_000_000
"""Timing a fetch takes some ten microseconds: where batches take less than a thousand times that,
some of them are timed."""


def _timed_fetch(fetch):
    due = [0]

    def timed_fetch(self, possibly_batched_index):
        writer = events.current
        if writer is None or _now() < due[0] or _cpu_now is None:
            return fetch(self, possibly_batched_index)
        samples = _between_clocks(self)
        started, samples[0] = _clocks(), _WANTED
        batch = fetch(self, possibly_batched_index)
        ready, samples[0] = samples[0], None
        if ready is not _WANTED:
            done = _clocks()
            _writer_of_workers(writer).prepared(_passed(started, ready), _passed(ready, done))
            due[0] = _now() + min(_RAREST_NS, TIMES_COST * (_now() - done[0]))
        return batch

    timed_fetch._stepscope = True
    return functools.update_wrapper(timed_fetch, fetch)


_of_workers = {}


def _writer_of_workers(writer):
    """Workers come and go by the thousand: those of one parent share a file."""
    try:
        key = writer.folder, os.getpid()
        found = _of_workers.get(key)
        if found is None:
            worker = sys.modules["torch.utils.data._utils.worker"].get_worker_info()
            shared = events.Writer(writer.folder, "workers-%d.bin" % os.getppid())
            found = _of_workers[key] = writer if worker is None else shared
        return found
    except Exception:
        return writer


def _between_clocks(fetcher):
    """Where the clocks are put down when the samples are there and collation begins."""
    found = getattr(fetcher, "_stepscope", None)
    if found is None:
        found = fetcher._stepscope = [None]
        collate = fetcher.collate_fn

        def noted_collate(data):
            if found[0] is _WANTED:
                found[0] = _clocks()
            return collate(data)

        fetcher.collate_fn = noted_collate
    return found


def _clocks():
    """Now, the CPU time of this thread, and how long it was ready to run but had no CPU."""
    return _now(), _cpu_now(), _without_cpu()


def _passed(before, after):
    return tuple(max(0, after[i] - before[i]) for i in range(3))


_schedule = {}
"""Descriptors of this thread's own account of the scheduler, by process and thread."""


def _without_cpu():
    key = os.getpid(), threading.get_ident()
    try:
        fd = _schedule.get(key)
        if fd is None:
            native = threading.get_native_id() if hasattr(threading, "get_native_id") else key[0]
            fd = events.open_high("/proc/%d/task/%d/schedstat" % (key[0], native))
            _schedule[key] = fd
        return int(os.pread(fd, 96, 0).split()[1]) if fd >= 0 else 0
    except Exception:  # a kernel without it, or the descriptor is another file's by now
        _schedule[key] = -1
        return 0
