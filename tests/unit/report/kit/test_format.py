"""Numbers as people read them."""

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
        (999.6, "1.00 kB"),
        (1500, "1.50 kB"),
        (999_900, "1.00 MB"),
        (2.314e9, "2.31 GB"),
        (23.14e9, "23.1 GB"),
        (4.2e18, "4,200 PB"),
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
        (0.0, "0 %"),
        (0.003, "0.3 %"),
        (0.0449, "4.5 %"),
        (0.812, "81 %"),
        (1.0, "100 %"),
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
        (2e9, "bytes", "2.00 GB"),
        (2e6, "bytes/s", "2.00 MB/s"),
        (120.0, "1/s", "120 /s"),
        (0.5, "share", "50 %"),
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


def test_gigabytes_are_in_the_unit_that_suits_them() -> None:
    assert texts.gigabytes_text(0.0015) == "1.50 MB"
    assert texts.gigabytes_text(None) == "–"


def test_allowed_cores_are_mostly_whole() -> None:
    assert [texts.allowed_text(cores) for cores in (2.0, 1.5)] == ["2", "1.50"]
