"""Formatting of numbers."""

from __future__ import annotations

import pytest

from stepscope.report.kit import format as texts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0, "0 B"),
        (512, "512 B"),
        (999.4, "999 B"),
        (999.6, "0.976 KiB"),
        (1536, "1.50 KiB"),
        (1023.9 * 1024, "1.00 MiB"),
        (2.314 * 2**30, "2.31 GiB"),
        (23.14 * 2**30, "23.1 GiB"),
        (4200 * 2**50, "4,200 PiB"),
    ],
)
def test_bytes(value: float | None, text: str) -> None:
    assert texts.bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.0123, "12 ms"),
        (0.1, "0.10 s"),
        (0.85, "0.85 s"),
        (0.999, "1.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (11_050, "3 h 04 min"),
        (86_400 * 2 + 3 * 3600, "2 d 03 h"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert texts.seconds_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0%"),
        (0.003, "0.3%"),
        (0.0449, "4.5%"),
        (0.812, "81%"),
        (1.0, "100%"),
    ],
)
def test_shares(value: float | None, text: str) -> None:
    assert texts.share_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0"), (12_345, "12,345"), (2.5, "2.5"), (200.4, "200")]
)
def test_counts(value: float | None, text: str) -> None:
    assert texts.count_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.004, "0.00"), (1.618, "1.62"), (9.996, "10.0"), (127.6, "128")]
)
def test_cores(value: float, text: str) -> None:
    assert texts.cores_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (9.996, "10.0"), (41.26, "41.3"), (12_345.6, "12,346")],
)
def test_significant_digits(value: float, text: str) -> None:
    assert texts.significant(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "cores", "1.50"),
        (2 << 30, "bytes", "2.00 GiB"),
        (2 << 20, "bytes/s", "2.00 MiB/s"),
        (120.0, "1/s", "120 /s"),
        (0.5, "share", "50%"),
        (3.0, "count", "3"),
        (0.002, "seconds", "2 ms"),
        (float("inf"), "cores", "–"),
        (411.6, "W", "412 W"),
        (61.0, "°C", "61 °C"),
        (1980.0, "MHz", "1,980 MHz"),
    ],
)
def test_values_by_unit(value: float, unit: str, text: str) -> None:
    assert texts.value_text(value, unit) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 J"),
        (85.21, "85.2 J"),
        (999.6, "1.00 kJ"),
        (412_345, "412 kJ"),
        (1.2e6, "1.20 MJ"),
        (5.5e12, "5,500 GJ"),
    ],
)
def test_joules(value: float | None, text: str) -> None:
    assert texts.joules_text(value) == text


def test_allowed_cores() -> None:
    assert [texts.allowed_text(cores) for cores in (2.0, 1.5)] == ["2", "1.50"]
