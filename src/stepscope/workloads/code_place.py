"""`FILE.py:NAME` or `package.module:NAME`: how a user names something in code of their own."""

from __future__ import annotations

from typing import NamedTuple


class CodePlace(NamedTuple):
    source: str
    """A file, or a module."""
    name: str
    """Empty where only the source was named."""

    @property
    def is_file(self) -> bool:
        return self.source.endswith(".py") or "/" in self.source


def parse_place(text: str) -> CodePlace:
    source, colon, name = text.rpartition(":")
    return CodePlace(source, name) if colon else CodePlace(text, "")


def is_place(text: str) -> bool:
    """Whether it is a place in a user's code, complete or not, rather than a name of ours."""
    return ":" in text or parse_place(text).is_file
