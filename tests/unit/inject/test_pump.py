"""The search for a pattern in the lines of an output."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.inject.pump import LineSearch, required_text

PATTERNS = [r"Epoch (\d+)", "(?i)ePOCh (\\d)", "(?i)kelvin", r"^(\d)$", "x*", "ä+", r"a|b", "�"]


def searched_naively(pattern: re.Pattern[str], data: bytes) -> list[str]:
    ends = (line[-65536:].decode("utf-8", "replace") for line in re.split(b"[\r\n]", data))
    return [match[0][:20] for end in filter(None, ends) if (match := pattern.search(end))]


@given(
    st.sampled_from(PATTERNS),
    st.lists(
        st.sampled_from([b"\n", b"\r", b"\r\n", b"Epoch 1", b"EPOCH", b" 2", b"x" * 70_000])
        | st.binary(max_size=20)
        | st.sampled_from("ä ab 7 \u212aelvin \ufffd".encode().split()),
        max_size=30,
    ),
    st.integers(1, 200),
)
@example(r"Epoch (\d+)", [b"Epoch 1\r\nEpoch 2\nEpoch ", b"3"], 3)
@example("x*", [b"x" * 70_000, b"\xc2\x80", b"\n"], 1)
@example("(?i)kelvin", ["\u212aelvin\n".encode()], 2)
def test_every_line_is_searched(source: str, pieces: list[bytes], block: int) -> None:
    """In whatever blocks the output arrives."""
    data, pattern = b"".join(pieces), re.compile(source)
    found: list[str] = []
    # Of a long line, the last 64 KiB are searched, or a few more.
    lines = LineSearch(pattern, lambda match: found.append(match[0][:20]))
    for begin in range(0, len(data), max(block, len(data) // 50)):
        lines.add(data[begin : begin + max(block, len(data) // 50)])
    lines.end()
    assert found == searched_naively(pattern, data)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"Epoch (\d+)/\d+", "Epoch "),
        (r"\[(\d+)/\d+\] train (loss|accuracy)", "] train "),
        ("(?i)Epoch: (\\d+)", "epoch: "),
        ("(?i)Step", "tep"),
        ("(?i:epoch) (\\d)", ""),
        ("epoch|step", ""),
        ("(abc)?x", "x"),
        ("(?:abc)+", "abc"),
        (r"(\d+)", ""),
    ],
)
def test_text_that_each_match_contains(pattern: str, text: str) -> None:
    assert required_text(re.compile(pattern)) == text.encode()
