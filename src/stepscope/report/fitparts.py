"""What all parts of a fit are made of: sections, and batches and memory as people read them.

Memory is in binary units here, as `--gpu-memory` takes it: what the answer says can be given back.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.report.format import MISSING, is_known
from stepscope.report.tables import Table
from stepscope.trials.limits import size_text


@dataclass(frozen=True)
class Section:
    """A heading, a table, and lines below it. All but the heading may be missing."""

    title: str
    lines: tuple[str, ...] = ()
    table: Table | None = None


def memory_text(size: float | None) -> str:
    """Bytes in the unit that suits them: 1.5 GiB."""
    if not is_known(size):
        return MISSING
    return f"-{size_text(round(-size))}" if size < 0 else size_text(round(size))


def given_text(size: int) -> str:
    """Exactly so many bytes, as an option takes them: 15GiB."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if size and size % (1 << bits) == 0:
            return f"{size >> bits}{unit}"
    return str(size)


def batch_text(batch: int) -> str:
    return f"{batch:,}"


def retries_text(retries: int) -> str:
    """How often the allocator had to try again, where it was counted."""
    if retries == 1:
        return "1 allocator retry"
    return f"{retries:,} allocator retries" if retries > 0 else "allocator retries"
