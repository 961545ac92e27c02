"""References to user code: `FILE.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

from typing import NamedTuple


class CodeReference(NamedTuple):
    source: str
    """A file or a module."""
    name: str
    """Empty if only the source is given."""

    @property
    def is_file(self) -> bool:
        return self.source.endswith(".py") or "/" in self.source


def parse_reference(text: str) -> CodeReference:
    source, colon, name = text.rpartition(":")
    return CodeReference(source, name) if colon else CodeReference(text, "")


def is_reference(text: str) -> bool:
    """Whether a text refers to user code, completely or not, rather than to a built-in name."""
    return ":" in text or parse_reference(text).is_file
