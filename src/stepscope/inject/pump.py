"""Forward the output of a command unchanged, keep a copy, and set a mark for each matching line.

It is a separate process, so that the output of the command is still read if the monitor is killed.
Standard library only. Usage: pump.py EVENTS_FOLDER PATTERN SOURCE:TARGET:LOG ...
"""

import os
import re
import select
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import events

_MAX_LINE = 65536
_LINE_ENDS = re.compile(rb"[\r\n]+")


class Stream:
    """One stream: its source, its target, and the current incomplete line."""

    def __init__(self, source, target, log, match_line):
        self.source = source
        self.target = target
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.match_line = match_line
        self.rest = b""
        self.is_terminal = os.isatty(target)

    def forward(self):
        """Forward available data. Return False if the source ended or the target is gone."""
        try:
            data = os.read(self.source, 65536)
        except OSError:  # a pseudo-terminal whose other end is closed
            data = b""
        if not data:
            self.match_line(self.rest)
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
        *lines, rest = _LINE_ENDS.split(self.rest + data)
        for line in lines:
            self.match_line(line)
        self.rest = rest[-_MAX_LINE:]


def _write_all(fd, data):
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process made the shared descriptor non-blocking
            select.select([], [fd], [])


def _line_matcher(folder, pattern):
    """Return a function that sets an epoch mark if a line matches the pattern."""
    writer = events.Writer(folder)

    def match_line(line):
        try:  # an error in a line must not stop the output
            mark(line.decode("utf-8", "replace"))
        except Exception:
            pass

    def mark(line):
        match = pattern.search(line)
        if match:
            groups = match.groupdict()
            epoch = groups.get("epoch") or next((g for g in match.groups() if g), None)
            is_number = epoch is not None and epoch.strip().isdecimal() and len(epoch) < 18
            value = int(epoch) if is_number else epoch
            writer.mark(events.MARK, "epoch", value, events.FROM_PATTERN)

    return match_line


def _copy_size(streams):
    """Set the size of the pseudo-terminals to that of the real terminal."""
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
    match_line = _line_matcher(arguments[0], re.compile(arguments[1]))
    streams = []
    for argument in arguments[2:]:
        source, target, log = argument.split(":", 2)
        streams.append(Stream(int(source), int(target), log, match_line))
    _copy_size(streams)
    signal.signal(signal.SIGWINCH, lambda *_: _copy_size(streams))
    while streams:
        ready, _, _ = select.select([stream.source for stream in streams], [], [])
        for stream in [s for s in streams if s.source in ready]:
            if not stream.forward():
                os.close(stream.source)
                streams.remove(stream)


if __name__ == "__main__":
    main(sys.argv[1:])
