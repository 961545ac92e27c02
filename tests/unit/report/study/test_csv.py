"""CSV tables of a study: columns, precision and reproducibility."""

from __future__ import annotations

import csv
import io
import random
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.study.records import RESPONSES
from stepscope.report.study.export import COLUMNS, TABLES, csv_text, write_tables
from stepscope.studies.trial_spec import NAMES
from synthetic_studies import (
    design_of,
    empty_study,
    grid,
    nasty_study,
    usual_study,
    view_of_results,
)


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_all_tables_are_written_with_their_columns(tmp_path: Path) -> None:
    view = usual_study(tmp_path, gpu=True)
    written = write_tables(view, tmp_path / "derived")
    assert [path.name for path in written] == list(TABLES)
    assert sorted(path.name for path in (tmp_path / "derived").iterdir()) == sorted(TABLES)
    trials = rows_of(tmp_path / "derived", "trials.csv")
    assert len(trials) == 160
    assert sum(row["counted"] == "true" for row in trials) == 159
    assert trials[-1]["outcome"] == "lost" and trials[-1]["samples_per_second"] == ""
    points = rows_of(tmp_path / "derived", "configurations.csv")
    assert len(points) == 53
    assert [row["outcome"] for row in points].count("host_oom") == 2
    best, expected = points[0], view.configurations[0]
    assert float(best["samples_per_second"]) == expected.values["samples_per_second"]
    assert float(best["host_memory_peak_bytes"]) == expected.values["host_memory_peak"]
    assert (best["factor_model"], best["factor_cpus"]) == ("cnn", "4.0")


def test_column_names_and_order(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    heads = {name: list(table(view)[0]) for name, table in TABLES.items()}
    assert heads["sensitivity.csv"] == [
        "group",
        "rank",
        "factor",
        "ratio",
        "ratio_low",
        "ratio_high",
        "best_level",
        "worst_level",
        "significant",
    ]
    assert heads["configurations.csv"] == [
        "key",
        "factor_model",
        "factor_batch_size",
        "factor_workers",
        "factor_cpus",
        "trials",
        "trials_ok",
        "outcome",
        "samples_per_second",
        "gpu_utilization_share",
        "gpu_sm_share",
        "cpu_share",
        "data_wait_share",
        "host_memory_peak_bytes",
        "gpu_memory_peak_bytes",
        "joules_per_sample",
        "samples_per_second_low",
        "samples_per_second_high",
        "step_seconds",
        "bottleneck",
    ]
    for head in heads.values():
        assert len(set(head)) == len(head)
        assert not {f"factor_{name}" for name in NAMES}.intersection(
            column for column in head if not column.startswith("factor_")
        )


def test_tables_do_not_depend_on_order_and_attempts(tmp_path: Path) -> None:
    design = design_of("x", {"workers": (0, 2), "cpus": (1.0, 2.0)})
    results = grid(design, random.Random(1))
    later = [
        replace(each, attempt=each.attempt + 1, block=each.block + 3, started=each.started + 1e6)
        for each in random.Random(2).sample(results, len(results))
    ]
    first, second = (
        view_of_results(design, tmp_path, sorted(each, key=lambda each: (each.key, each.repeat)))
        for each in (results, later)
    )
    # The analysis gets trials in a fixed order; everything else may be in any order.
    second = replace(second, counted=later, results=later)
    write_tables(first, tmp_path / "a")
    write_tables(second, tmp_path / "b")
    different = {
        name
        for name in TABLES
        if (tmp_path / "a" / name).read_bytes() != (tmp_path / "b" / name).read_bytes()
    }
    assert different == {"trials.csv"}


def test_every_response_has_a_column() -> None:
    assert COLUMNS.keys() == RESPONSES.keys()


def test_numbers_have_full_precision(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    write_tables(view, tmp_path)
    for row, effect in zip(
        rows_of(tmp_path, "sensitivity.csv"), view.analysis.sensitivity[0].effects, strict=False
    ):
        assert float(row["ratio"]) == effect.size.value
        assert float(row["ratio_low"]) == effect.size.low
    curve = view.analysis.curves[0]
    scaling = rows_of(tmp_path, "scaling.csv")[0]
    assert float(scaling["samples_per_second"]) == curve.points[0].mean


def test_empty_study_has_headers_only(tmp_path: Path) -> None:
    tables = list(write_tables(empty_study(tmp_path), tmp_path))
    assert len(tables) > 5
    for path in tables:
        assert path.read_bytes().count(b"\r\n") == 1


def test_user_text_is_quoted(tmp_path: Path) -> None:
    view = nasty_study(tmp_path)
    write_tables(view, tmp_path)
    (row,) = rows_of(tmp_path, "skipped.csv")
    assert row["reason"] == view.skipped[0].why
    assert rows_of(tmp_path, "trials.csv")[-1]["reason"] == view.results[-1].reason


@given(
    st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=2, max_size=2))
)
def test_text_round_trip(rows: list[list[str]]) -> None:
    text = csv_text(("a", "b"), [{"a": one, "b": other} for one, other in rows])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", "b"], *rows]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_number_round_trip(value: float) -> None:
    _, text = csv_text(["value"], [{"value": value}]).split()
    assert float(text) == value
