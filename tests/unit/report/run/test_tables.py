"""Tables and headline numbers, from hand-made summaries."""

from __future__ import annotations

from dataclasses import replace

from stepscope.records import EpochRow, Statistic, Summary
from stepscope.report.run import tables
from stepscope.report.run.headline import data_wait_share, headline_of, samples_per_second

ROW = EpochRow(
    index=0,
    begin_s=1.0,
    seconds=10.0,
    steps=50,
    samples=6400,
    samples_per_second=640.0,
    data_wait_share=0.4,
    core_seconds=20.0,
    cores=2.0,
    read_gb=1.5,
    written_gb=None,
    memory_peak_bytes=2e9,
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
    watcher={},
    totals={},
)


def test_ledger_leaves_out_what_is_not_known_of_any_epoch() -> None:
    table = tables.ledger([ROW, replace(ROW, index=1, complete=False)])
    titles = [column.title for column in table.columns]
    assert "Written" not in titles
    assert dict(zip(titles, table.rows[0], strict=True)) == {
        "Epoch": "0",
        "Start": "1.0 s",
        "Time": "10.0 s",
        "Steps": "50",
        "Samples": "6,400",
        "Samples/s": "640",
        "Data wait": "40 %",
        "Cores": "2.00",
        "Core-seconds": "20.0",
        "Read": "1.50 GB",
        "Peak memory": "2.00 GB",
    }
    assert table.rows[1][0] == "1 (cut)"


def test_long_ledger_says_how_many_epochs_are_between() -> None:
    table = tables.shortened(tables.ledger([replace(ROW, index=i) for i in range(100)]))
    assert len(table.rows) == 13
    assert [row[0] for row in table.rows][4:8] == ["4", "5", "…", "94"]
    assert "88 more" in table.rows[6]
    whole = tables.ledger([replace(ROW, index=i) for i in range(12)])
    assert tables.shortened(whole) == whole


def test_statistics_are_in_the_order_of_the_metrics() -> None:
    found = [
        Statistic("host_cpu", "host", 1, 2, 3, 10),
        Statistic("cpu", "worker", 1, 2, 3, 10),
        Statistic("cpu", "tree", 1, 2, 3, 10),
    ]
    rows = tables.statistics(replace(EMPTY, statistics=tuple(found))).rows
    assert [row[:2] for row in rows] == [("CPU", "tree"), ("CPU", "worker"), ("host CPU", "host")]
    assert rows[0][2:] == ("cores", "1.00", "2.00", "3.00", "10")


def test_headline_of_nothing_is_unknown_not_zero() -> None:
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
        epochs=(ROW, replace(ROW, index=1, data_wait_share=0.2)),
        epoch_source="loader",
        statistics=(
            Statistic("cpu", "tree", 2.0, 3.0, 3.5, 300),
            Statistic("memory", "tree", 1.5e9, 2e9, 2.2e9, 300),
        ),
        totals={"read": 3e9, "write": 1e6},
    )
    shown = {each.label: (each.value, each.detail) for each in headline_of(summary)}
    assert shown == {
        "Duration": ("30.0 s", "20.0 s in epochs"),
        "Epochs": ("2", "from the data loader"),
        "Steps": ("100", "5.00 a second"),
        "Samples/s": ("640", "12,800 samples"),
        "Cores used": ("2.00 of 4", "mean, 50 % of the allowed"),
        "Peak memory": ("2.20 GB", "mean 1.50 GB"),
        "Read from disk": ("3.00 GB", "1.00 MB written"),
        "Waiting for data": ("30 %", "of the epochs' time"),
    }


def test_rates_over_epochs_weigh_by_time() -> None:
    long = replace(ROW, seconds=30.0, data_wait_share=0.0)
    untold = replace(ROW, samples=None, data_wait_share=None)
    assert samples_per_second([ROW, long, untold]) == 12_800 / 40
    assert data_wait_share([ROW, long, untold]) == 0.1
    assert samples_per_second([untold]) is None
    assert data_wait_share([]) is None
