"""Tables and headline tiles, from hand-made summaries."""

from __future__ import annotations

from dataclasses import replace

from stepscope.records import EpochRow, Statistic, Summary
from stepscope.report.run import tables
from stepscope.report.run.headline import data_wait_share, headline_of, samples_per_second

ROW = EpochRow(
    index=1,
    begin_s=1.0,
    seconds=10.0,
    steps=50,
    samples=6400,
    samples_per_second=640.0,
    data_wait_share=0.4,
    core_seconds=20.0,
    cores=2.0,
    read_bytes=1.5 * 2**30,
    written_bytes=None,
    memory_peak_bytes=2 << 30,
)

EMPTY = Summary(
    seconds=0.0,
    cpu_allowed=None,
    core_seconds=None,
    steps=0,
    samples=None,
    epochs=(),
    epoch_source=None,
    phases=(),
    statistics=(),
    roles=(),
    monitor={},
    totals={},
)


def test_epochs_table_omits_empty_columns() -> None:
    table = tables.epochs_table([ROW, replace(ROW, index=2, complete=False)])
    titles = [column.title for column in table.columns]
    assert "Disk writes" not in titles
    assert dict(zip(titles, table.rows[0], strict=True)) == {
        "Epoch": "1",
        "Start": "1.0 s",
        "Time": "10.0 s",
        "Steps": "50",
        "Samples": "6,400",
        "Samples/s": "640",
        "Data wait": "40%",
        "Cores": "2.00",
        "Core-seconds": "20.0",
        "Disk reads": "1.50 GiB",
        "Peak memory": "2.00 GiB",
    }
    assert table.rows[1][0] == "2 (partial)"


def test_long_epochs_table_is_shortened() -> None:
    table = tables.shortened(tables.epochs_table([replace(ROW, index=i) for i in range(100)]))
    assert len(table.rows) == 13
    assert [row[0] for row in table.rows][4:8] == ["4", "5", "…", "94"]
    assert "88 more" in table.rows[6]
    whole = tables.epochs_table([replace(ROW, index=i) for i in range(12)])
    assert tables.shortened(whole) == whole


def test_statistics_are_in_the_order_of_the_metrics() -> None:
    found = [
        Statistic("host_cpu", "host", 1, 2, 3, 10),
        Statistic("cpu", "worker", 1, 2, 3, 10),
        Statistic("cpu", "tree", 1, 2, 3, 10),
    ]
    rows = tables.statistics(replace(EMPTY, statistics=tuple(found))).rows
    assert [row[:2] for row in rows] == [("CPU", "tree"), ("CPU", "worker"), ("Host CPU", "host")]
    assert rows[0][2:] == ("cores", "1.00", "2.00", "3.00", "10")


def test_headline_of_an_empty_run_is_unknown_not_zero() -> None:
    values = {each.label: each.value for each in headline_of(EMPTY)}
    assert values.pop("Duration") == "0 s"
    assert set(values.values()) == {"–"}


def test_headline_numbers() -> None:
    summary = replace(
        EMPTY,
        seconds=30.0,
        cpu_allowed=4.0,
        steps=100,
        samples=12_800,
        epochs=(ROW, replace(ROW, index=2, data_wait_share=0.2)),
        epoch_source="loader",
        statistics=(
            Statistic("cpu", "tree", 2.0, 3.0, 3.5, 300),
            Statistic("memory", "tree", 1.5 * 2**30, 2 << 30, 2.2 * 2**30, 300),
        ),
        totals={"read": 3 << 30, "write": 1 << 20},
    )
    shown = {each.label: (each.value, each.detail) for each in headline_of(summary)}
    assert shown == {
        "Duration": ("30.0 s", "20.0 s in epochs"),
        "Epochs": ("2", "from the DataLoader"),
        "Steps": ("100", "5.00 steps/s"),
        "Samples/s": ("640", "12,800 samples"),
        "Cores used": ("2.00 of 4", "mean, 50% of allowed cores"),
        "Peak memory": ("2.20 GiB", "mean 1.50 GiB"),
        "Disk reads": ("3.00 GiB", "1.00 MiB written"),
        "Data wait": ("30%", "of epoch time"),
    }


def test_rates_over_epochs_are_weighted_by_time() -> None:
    long = replace(ROW, seconds=30.0, data_wait_share=0.0)
    unknown = replace(ROW, samples=None, data_wait_share=None)
    assert samples_per_second([ROW, long, unknown]) == 12_800 / 40
    assert data_wait_share([ROW, long, unknown]) == 0.1
    assert samples_per_second([unknown]) is None
    assert data_wait_share([]) is None
