"""Tables of a study for other programs: exact, and the same however often it stopped."""

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
    assert sum(row["counts"] == "true" for row in trials) == 159
    assert trials[-1]["outcome"] == "lost" and trials[-1]["samples_per_second"] == ""
    points = rows_of(tmp_path / "derived", "configurations.csv")
    assert len(points) == 53
    assert [row["outcome"] for row in points].count("host_oom") == 2
    best, told = points[0], view.configurations[0]
    assert float(best["samples_per_second"]) == told.values["samples_per_second"]
    assert float(best["host_memory_peak_bytes"]) == told.values["host_memory_peak"]
    assert (best["factor_model"], best["factor_cpus"]) == ("cnn", "4.0")


def test_columns_keep_their_names_and_order(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    heads = {name: list(table(view)[0]) for name, table in TABLES.items()}
    assert heads["sensitivity.csv"] == [
        "group",
        "rank",
        "factor",
        "ratio",
        "ratio_low",
        "ratio_high",
        "best",
        "worst",
        "told",
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
        "held_back_by",
    ]
    for head in heads.values():
        assert len(set(head)) == len(head)
        assert not {f"factor_{name}" for name in NAMES}.intersection(
            column for column in head if not column.startswith("factor_")
        )


def test_same_results_make_the_same_bytes_however_often_they_were_tried(tmp_path: Path) -> None:
    design = design_of("x", {"workers": (0, 2), "cpus": (1.0, 2.0)})
    results = grid(design, random.Random(1))
    later = [
        replace(each, attempt=each.attempt + 1, block=each.block + 3, began=each.began + 1e6)
        for each in random.Random(2).sample(results, len(results))
    ]
    by_place = sorted(later, key=lambda each: (each.key, each.repeat))
    calm, again = (
        view_of_results(design, tmp_path, each)
        for each in (sorted(results, key=lambda each: (each.key, each.repeat)), by_place)
    )
    # The analysis is given trials in one order; all else may come as it did.
    again = replace(again, counted=later, results=later)
    write_tables(calm, tmp_path / "a")
    write_tables(again, tmp_path / "b")
    differ = {
        name
        for name in TABLES
        if (tmp_path / "a" / name).read_bytes() != (tmp_path / "b" / name).read_bytes()
    }
    assert differ == {"trials.csv"}


def test_every_response_has_a_column() -> None:
    assert COLUMNS.keys() == RESPONSES.keys()


def test_numbers_have_all_their_digits(tmp_path: Path) -> None:
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


def test_an_empty_study_has_tables_of_headings(tmp_path: Path) -> None:
    tables = list(write_tables(empty_study(tmp_path), tmp_path))
    assert len(tables) > 5
    for path in tables:
        assert path.read_bytes().count(b"\r\n") == 1


def test_texts_of_users_stay_in_their_cell(tmp_path: Path) -> None:
    view = nasty_study(tmp_path)
    write_tables(view, tmp_path)
    (row,) = rows_of(tmp_path, "skipped.csv")
    assert row["reason"] == view.skipped[0].why
    assert rows_of(tmp_path, "trials.csv")[-1]["reason"] == view.results[-1].reason


@given(
    st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=2, max_size=2))
)
def test_csv_reads_back_as_it_was_written(rows: list[list[str]]) -> None:
    text = csv_text(("a", "b"), [{"a": one, "b": other} for one, other in rows])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", "b"], *rows]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_reads_back_as_it_was(value: float) -> None:
    _, text = csv_text(["value"], [{"value": value}]).split()
    assert float(text) == value
