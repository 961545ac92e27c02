"""Forward one output stream of a command unchanged, keep a copy, and mark each matching line.

It is a separate process, so that the output of the command is still read if the monitor is killed.
If this process is killed, the monitor starts it again. Standard library only. Usage:

    pump.py EVENTS_FOLDER EVENTS_FILE PATTERN SOURCE TARGET LOG READY

SOURCE, TARGET and READY are descriptors. A byte is written to READY when everything is prepared.
"""

import os
import re
import select
import signal
import sys

SOURCE_ENDED, TARGET_GONE, OUTPUT_LOST = 0, 3, 4
"""Exit codes. After any other one the pump is started again."""

_BLOCK = 1 << 18  # fits into the CPU cache
_PIPE_BYTES = 1 << 20  # the largest size that Linux allows without privileges
_MAX_LINE = 65536


class LineSearch:
    """Calls `found` with the match of each line in which a pattern is found.

    A line ends with \\r or \\n. Only its last 64 KiB are searched. Lines without the text that each
    match contains are skipped, at more than ten times the speed.
    """

    def __init__(self, pattern, found):
        self._pattern = pattern
        self._found = found
        self._text = required_text(pattern)
        self._folds = bool(pattern.flags & re.IGNORECASE)
        self._rest = b""

    def add(self, data):
        """Search the next block of the output."""
        data = self._rest + data.replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        self._rest = data[max(end, len(data) - _MAX_LINE) :]
        if not self._text:
            self._search(data[:end])
            return
        searched = data.lower() if self._folds else data
        line_end = 0
        at = searched.find(self._text, 0, end)
        while at >= 0:
            begin = data.rfind(b"\n", line_end, at) + 1
            line_end = data.find(b"\n", at)
            self._search(data[begin:line_end])
            at = searched.find(self._text, line_end, end)

    def end(self):
        """Search the last line, which has no end."""
        self._search(self._rest)
        self._rest = b""

    def _search(self, lines):
        for line in lines.decode("utf-8", "replace").split("\n"):
            try:  # an error in a line must not stop the output
                match = line and self._pattern.search(line[-_MAX_LINE:])
                if match:
                    self._found(match)
            except Exception:
                pass


def required_text(pattern):
    """Return the longest text that each match of a pattern contains, in UTF-8, or b"". It is in
    lower case if the pattern ignores the case."""
    texts = [""]
    folds = pattern.flags & re.IGNORECASE

    def is_found(character):
        """Whether the bytes of a line contain a character if its text does."""
        if folds:  # the others also match letters such as the Kelvin sign
            return ord(character) < 128 and character not in "iks\r\n"
        # Invalid bytes are decoded as U+FFFD, and a line contains no line ends or surrogates.
        return character not in "\r\n\ufffd" and ord(character) >> 11 != 27

    def add(parsed):
        for kind, value in parsed:
            name = str(kind)
            if name == "LITERAL" and is_found(chr(value).lower() if folds else chr(value)):
                texts[-1] += chr(value)
            elif name == "SUBPATTERN" and not (value[1] or value[2]):  # a group without flags
                add(value[3])
            elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0]:
                texts.append("")
                add(value[2])
                texts.append("")
            elif name != "AT":
                texts.append("")

    try:
        try:
            from re import _parser as parser
        except ImportError:  # Python 3.10
            import sre_parse as parser
        add(parser.parse(pattern.pattern, pattern.flags))
    except Exception:  # the parser is not public: a later version may differ
        return b""
    text = max(texts, key=len)
    if text == " ":  # it is in almost every line
        return b""
    return (text.lower() if folds else text).encode()


def _mark_epoch(writer, match):
    epoch = match.groupdict().get("epoch") or next((g for g in match.groups() if g), None)
    is_number = epoch is not None and epoch.strip().isdecimal() and len(epoch) < 18
    writer.mark(events.MARK, "epoch", int(epoch) if is_number else epoch, events.FROM_PATTERN)


def _write_all(fd, data):
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another process made the shared descriptor non-blocking
            select.select([], [fd], [])


def _copy_size(source, target):
    """Set the size of a pseudo-terminal to that of the real terminal."""
    import fcntl
    import termios

    if os.isatty(target) and os.isatty(source):
        try:
            size = fcntl.ioctl(target, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(source, termios.TIOCSWINSZ, size)
        except OSError:
            pass


def forward(source, target, log, lines):
    """Forward all data until the source ends or nobody reads the target. Return the exit code.

    Data that cannot be written, for example to a full disk, is dropped: the command continues.
    """
    at_end = SOURCE_ENDED
    while True:
        try:
            data = os.read(source, _BLOCK)
        except OSError:  # a pseudo-terminal whose other end is closed
            data = b""
        if not data:
            lines.end()
            return at_end
        lines.add(data)  # first: a mark has the time at which its line was read
        try:
            _write_all(target, data)
        except BrokenPipeError:
            return TARGET_GONE
        except OSError:
            at_end = OUTPUT_LOST
        try:
            _write_all(log, data)
        except OSError:
            pass


def main(folder, file, pattern, source, target, log, ready):
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    source, target, ready = int(source), int(target), int(ready)
    # All pumps of a run share a file without START records: the marks of one timeline.
    writer = events.Writer(folder, file)
    writer._started = True
    lines = LineSearch(re.compile(pattern), lambda match: _mark_epoch(writer, match))
    try:
        log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    except OSError:  # the run folder was deleted
        log = -1
    try:
        import fcntl

        fcntl.fcntl(source, 1031, _PIPE_BYTES)  # F_SETPIPE_SZ
    except OSError:  # a pseudo-terminal, or not permitted
        pass
    _copy_size(source, target)
    signal.signal(signal.SIGWINCH, lambda *_: _copy_size(source, target))
    if ready >= 0:
        os.write(ready, b".")
        os.close(ready)
    return forward(source, target, log, lines)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import events

    sys.exit(main(*sys.argv[1:]))
