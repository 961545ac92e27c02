"""Samples the stack of the training thread some twenty times a second: which line of code it is at.

A thread of its own reads the other's frames; it neither stops nor traces anything. A sample stands
for the time since the one before: code that holds the interpreter keeps us from sampling, and is
found when it lets go. Times are told by place every few seconds. Standard library only, never
raises.
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

EVERY_S = 0.05
TELL_S = 2.0
MOST_COST = 0.002
"""CPU time of sampling, as a share of all time, above which samples become rarer."""
LONGEST_S = 1.0
_MOST_SOURCE = 4 * 1024 * 1024
_MOST_CODE = 160
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

_running = None
"""The process in which the thread runs: a forked child has none."""


def begin(thread):
    """Sample a thread of this process from now on; once is enough."""
    global _running
    if _running == os.getpid() or _thread is None:
        return
    _running = os.getpid()
    try:
        # What the script blocks for itself must not be taken by a thread that it does not know of,
        # which is born with the mask of the one that starts it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(_run, (thread,))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except Exception:
        pass


def _run(thread):
    global _running
    try:
        _sample_until_gone(thread)
    except Exception:
        pass
    _running = None  # another thread may train next


def _sample_until_gone(thread):
    times, every = {}, EVERY_S
    last = told = time.monotonic()
    cost = time.thread_time()
    dice = os.getpid()
    while True:
        dice = (dice * 1103515245 + 12345) & 0x7FFFFFFF
        time.sleep(every * (0.5 + dice / float(0x7FFFFFFF)))  # not in step with the steps
        frame = sys._current_frames().get(thread)
        now = time.monotonic()
        if frame is None:
            break
        place = _place(frame)
        times[place] = times.get(place, 0.0) + now - last
        last = now
        del frame
        if now - told >= TELL_S:
            tell(times)
            times = {}
            spent = time.thread_time() - cost
            if spent > MOST_COST * (now - told):
                every = min(LONGEST_S, every * 2)
            told, cost = now, time.thread_time()
    tell(times)


def tell(times):
    writer = events.current
    if writer is not None:
        for place, seconds in times.items():
            writer.write_named(events.WHERE, describe(place), b=int(seconds * 1e6))


def _place(frame):
    """Where a thread is, as keys that are cheap to take: the innermost frame, the innermost that
    is not in a library, and what part of PyTorch it went through."""
    inner = (frame.f_code, frame.f_lasti, frame.f_lineno)
    outer, part = None, ""
    for _ in range(_DEEPEST):
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
"""By the folder of a frame; of several the highest counts: what a loader calls is loading."""

_LAUNCHER = os.path.join("torch", "distributed", "elastic")
"""It wraps all of a script's `main`, and says nothing of what that does."""
_DEEPEST = 200
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


def describe(place):
    """A place as text: the user's line, its code, the innermost function, its code, the part."""
    inner, outer, part = place
    return "\t".join(
        (
            "%s:%d" % (short_path(outer[0].co_filename), outer[2] or 0),
            code_at(outer),
            "%s:%s" % (short_path(inner[0].co_filename), inner[0].co_name),
            "" if inner == outer else code_at(inner),
            part[2:],
        )
    )


_are_library = {}


def is_library(path):
    known = _are_library.get(path)
    if known is None:
        known = (
            path.startswith(("<frozen", "<string"))
            or "site-packages" in path
            or "dist-packages" in path
            or path.startswith((_OURS, _STANDARD))
        )
        _are_library[path] = known
    return known


def short_path(path):
    """A path as the user would write it; of a library, from its package on."""
    for folder in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if folder in path:
            return path.rpartition(folder)[2]
    if path.startswith(_STANDARD):
        return path[len(_STANDARD) :]
    if path.startswith(_OURS):
        return os.path.join("stepscope", path[len(_OURS) :])
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return os.path.basename(path)
    return os.path.basename(path) if relative.startswith("..") else relative


_sources = {}
_positions = {}


def _lines_of(path):
    """The lines of a source file, read once; none where there is no such file."""
    if path not in _sources:
        lines = []
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = b""
                while len(data) < _MOST_SOURCE:
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


def code_at(spot):
    """The expression that is being evaluated, or its line where that is not known (before 3.11)."""
    code, instruction, line = spot
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
    return b" ".join(piece.split()).decode("utf-8", "replace")[:_MOST_CODE]


def line_of_caller(depth):
    """The innermost line outside of libraries that leads here: "train.py:41<tab>its code"."""
    try:
        frame = sys._getframe(depth)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        lines = _lines_of(frame.f_code.co_filename)
        text = lines[frame.f_lineno - 1] if frame.f_lineno <= len(lines) else b""
        code = b" ".join(text.split()).decode("utf-8", "replace")[:_MOST_CODE]
        return "%s:%d\t%s" % (short_path(frame.f_code.co_filename), frame.f_lineno, code)
    except Exception:
        return ""
