"""Passes a command's output on, byte for byte, keeps a copy, and marks lines that match.

A process of its own, and standard library only: if the watcher is killed, the command still has
someone who reads what it prints. Started as: pump.py EVENTS_FOLDER PATTERN SOURCE:TARGET:LOG ...
"""

import os
import re
import select
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import events

_LONGEST_LINE = 65536
_ENDS = re.compile(rb"[\r\n]+")


class Stream:
    """One stream: where it comes from, where it goes, and the line that is not complete yet."""

    def __init__(self, source, target, log, watch):
        self.source = source
        self.target = target
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.watch = watch
        self.rest = b""
        self.is_terminal = os.isatty(target)

    def pass_on(self):
        """False once the source has ended or the target is gone."""
        try:
            data = os.read(self.source, 65536)
        except OSError:  # a pseudo-terminal whose other side is closed
            data = b""
        if not data:
            self.watch(self.rest)
            return False
        try:
            _write_all(self.target, data)
        except OSError:
            return False
        try:
            _write_all(self.log, data)
        except OSError:
            pass
        self.find_lines(data)
        return True

    def find_lines(self, data):
        *lines, rest = _ENDS.split(self.rest + data)
        for line in lines:
            self.watch(line)
        self.rest = rest[-_LONGEST_LINE:]


def _write_all(fd, data):
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # somebody we share it with made it non-blocking
            select.select([], [fd], [])


def _marker(folder, pattern):
    writer = events.Writer(folder)

    def watch(line):
        """Whatever a line holds, the output must go on."""
        try:
            mark(line.decode("utf-8", "replace"))
        except Exception:
            pass

    def mark(line):
        match = pattern.search(line)
        if match:
            groups = match.groupdict()
            found = groups.get("epoch") or next((g for g in match.groups() if g), None)
            is_number = found is not None and found.strip().isdecimal() and len(found) < 18
            value = int(found) if is_number else found
            writer.mark(events.MARK, "epoch", value, events.FROM_PATTERN)

    return watch


def _copy_size(streams):
    """Give the pseudo-terminals the size of the real one."""
    import fcntl
    import termios

    for stream in streams:
        if stream.is_terminal and os.isatty(stream.source):
            try:
                size = fcntl.ioctl(stream.target, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(stream.source, termios.TIOCSWINSZ, size)
            except OSError:
                pass


def main(arguments):
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    watch = _marker(arguments[0], re.compile(arguments[1]))
    streams = []
    for argument in arguments[2:]:
        source, target, log = argument.split(":", 2)
        streams.append(Stream(int(source), int(target), log, watch))
    _copy_size(streams)
    signal.signal(signal.SIGWINCH, lambda *_: _copy_size(streams))
    while streams:
        ready, _, _ = select.select([stream.source for stream in streams], [], [])
        for stream in [s for s in streams if s.source in ready]:
            if not stream.pass_on():
                os.close(stream.source)
                streams.remove(stream)


if __name__ == "__main__":
    main(sys.argv[1:])
