"""Sample the stack of the training thread about twenty times a second.

A separate thread reads the frames; nothing is stopped or traced. A sample covers the time since the
previous one: code that holds the GIL delays the next sample, which then finds it. The time per
location is reported every few seconds. Standard library only, never raises.
"""

import os
import signal
import sys
import time

try:
    import _thread
except ImportError:  # a Python without threads
    _thread = None

events = sys.modules["_stepscope_events"]

INTERVAL_S = 0.05
REPORT_S = 2.0
MAX_COST = 0.002
"""CPU time of sampling, as a share of the elapsed time, above which the interval is doubled."""
MAX_INTERVAL_S = 1.0
_MAX_SOURCE = 4 * 1024 * 1024
_MAX_CODE = 160
_STEPSCOPE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

_running = None
"""The pid of the process with the sampling thread: a forked child has none."""


def begin(thread):
    """Start sampling a thread of this process, unless a thread is already sampled."""
    global _running
    if _running == os.getpid() or _thread is None:
        return
    _running = os.getpid()
    try:
        # The new thread inherits the signal mask. It must block all signals, so that it does not
        # receive those that the script blocks for itself.
        every = getattr(signal, "valid_signals", lambda: set(signal.Signals))()  # Python 3.8
        before = signal.pthread_sigmask(signal.SIG_BLOCK, every)
        try:
            _thread.start_new_thread(_run, (thread,))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except Exception:
        pass


def _run(thread):
    global _running
    try:
        _sample_until_exit(thread)
    except Exception:
        pass
    _running = None  # another thread may train next


def _sample_until_exit(thread):
    times, interval = {}, INTERVAL_S
    last = reported = time.monotonic()
    cost = time.thread_time()
    random = os.getpid()
    while True:
        random = (random * 1103515245 + 12345) & 0x7FFFFFFF
        time.sleep(interval * (0.5 + random / float(0x7FFFFFFF)))  # not in phase with the steps
        frame = sys._current_frames().get(thread)
        now = time.monotonic()
        if frame is None:
            break
        location = _location(frame)
        times[location] = times.get(location, 0.0) + now - last
        last = now
        del frame
        if now - reported >= REPORT_S:
            report(times)
            times = {}
            spent = time.thread_time() - cost
            if spent > MAX_COST * (now - reported):
                interval = min(MAX_INTERVAL_S, interval * 2)
            reported, cost = now, time.thread_time()
    report(times)


def report(times):
    writer = events.current
    if writer is not None:
        for location, seconds in times.items():
            writer.write_named(events.WHERE, describe(location), b=int(seconds * 1e6))


def _location(frame):
    """Return the location of a thread as inexpensive keys: the innermost frame, the innermost frame
    outside of libraries, and the part of PyTorch in the stack."""
    inner = (frame.f_code, frame.f_lasti, frame.f_lineno)
    outer, part = None, ""
    for _ in range(_MAX_DEPTH):
        path = frame.f_code.co_filename
        if outer is None and not is_library(path):
            outer = (frame.f_code, frame.f_lasti, frame.f_lineno)
        part = max(part, _part_of(path))
        frame = frame.f_back
        if frame is None:
            break
    return inner, outer or inner, part


_PARTS = (
    (os.path.join("torch", "nn", "modules"), "1 forward"),
    (os.path.join("torch", "optim"), "2 optimizer"),
    (os.path.join("torch", "autograd"), "3 backward"),
    (os.path.join("torch", "distributed"), "4 ranks"),
    (os.path.join("torch", "serialization"), "5 save"),
    (os.path.join("torch", "utils", "data"), "6 loader"),
)
"""Part of PyTorch by folder. The highest number in the stack counts: a loader calls other parts."""

_LAUNCHER = os.path.join("torch", "distributed", "elastic")
"""It wraps the `main` of a script, so it is in every stack and not a part."""
_MAX_DEPTH = 200
_parts = {}


def _part_of(path):
    known = _parts.get(path)
    if known is None:
        known = ""
        for folder, part in _PARTS:
            if os.sep + folder in path and _LAUNCHER not in path:
                known = part
        _parts[path] = known
    return known


def describe(location):
    """Return a location as text: the user's line, its code, the innermost function, its code, the
    part."""
    inner, outer, part = location
    return "\t".join(
        (
            "%s:%d" % (short_path(outer[0].co_filename), outer[2] or 0),
            code_at(outer),
            "%s:%s" % (short_path(inner[0].co_filename), inner[0].co_name),
            "" if inner == outer else code_at(inner),
            part[2:],
        )
    )


_library_paths = {}


def is_library(path):
    known = _library_paths.get(path)
    if known is None:
        known = (
            path.startswith(("<frozen", "<string"))
            or "site-packages" in path
            or "dist-packages" in path
            or path.startswith((_STEPSCOPE, _STANDARD_LIBRARY))
        )
        _library_paths[path] = known
    return known


def short_path(path):
    """Return a path relative to the current folder; for a library, starting at its package."""
    for folder in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if folder in path:
            return path.rpartition(folder)[2]
    if path.startswith(_STANDARD_LIBRARY):
        return path[len(_STANDARD_LIBRARY) :]
    if path.startswith(_STEPSCOPE):
        return os.path.join("stepscope", path[len(_STEPSCOPE) :])
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return os.path.basename(path)
    return os.path.basename(path) if relative.startswith("..") else relative


_sources = {}
_positions = {}


def _lines_of(path):
    """Return the lines of a source file, which is read once; empty if it does not exist."""
    if path not in _sources:
        lines = []
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = b""
                while len(data) < _MAX_SOURCE:
                    piece = os.read(fd, 1 << 20)
                    if not piece:
                        break
                    data += piece
            finally:
                os.close(fd)
            lines = data.split(b"\n")
        except Exception:
            pass
        _sources[path] = lines
    return _sources[path]


def code_at(position):
    """Return the expression that is being evaluated, or its line before Python 3.11."""
    code, instruction, line = position
    try:
        source = _lines_of(code.co_filename)[(line or 1) - 1]
    except IndexError:
        return ""
    piece = source
    try:
        if code not in _positions:
            _positions[code] = list(code.co_positions())
        begin, end, first, last = _positions[code][instruction // 2]
        if begin == end == line and first is not None and last is not None:
            piece = source[first:last]
    except Exception:
        pass
    return b" ".join(piece.split()).decode("utf-8", "replace")[:_MAX_CODE]


def line_of_caller(depth):
    """Return the innermost line outside of libraries in the stack: "train.py:41<tab>code"."""
    try:
        frame = sys._getframe(depth)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        lines = _lines_of(frame.f_code.co_filename)
        text = lines[frame.f_lineno - 1] if frame.f_lineno <= len(lines) else b""
        code = b" ".join(text.split()).decode("utf-8", "replace")[:_MAX_CODE]
        return "%s:%d\t%s" % (short_path(frame.f_code.co_filename), frame.f_lineno, code)
    except Exception:
        return ""
