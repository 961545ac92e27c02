"""The panels of a run, from hand-made series."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import Series, SeriesTable
from stepscope.report.kit.document import Panel
from stepscope.report.run.panels import network, panels_of, roles_in_order
from synthetic import cpus_allowed

SECOND = 10**9


def flat(value: float, count: int = 20) -> Series:
    t = np.arange(1, count + 1, dtype=np.int64) * SECOND
    return Series(t, np.ones(count), np.full(count, float(value)))


def recorded(series: SeriesTable, allowed: float | None = None) -> RunData:
    return RunData(series, [], 0, 20 * SECOND, cpus_allowed(allowed))


def labels(panel: Panel, shown: bool | None = None) -> list[str]:
    return [line.label for line in panel.lines if shown in (None, line.shown)]


def test_every_run_has_three_panels_even_without_samples() -> None:
    panels = panels_of(recorded({}), 20)
    assert [panel.unit for panel in panels] == ["GiB", "MiB/s", "cores"]
    assert not any(panel.lines for panel in panels)


def test_lines_have_the_unit_and_time_axis_of_the_panel() -> None:
    memory, disk, cpu = panels_of(
        recorded(
            {
                ("memory", "tree"): flat(2 << 30),
                ("read", "tree"): flat(5 << 20),
                ("cpu", "tree"): flat(1),
            }
        ),
        20,
    )
    assert memory.lines[0].y[0] == 2
    assert disk.lines[0].y[0] == 5
    assert cpu.lines[0].y[0] == 1
    assert memory.lines[0].x[[0, -1]].tolist() == [1, 20]


def test_roles_have_lines_unless_there_is_only_one() -> None:
    one = {("cpu", "tree"): flat(1), ("cpu", "main"): flat(1)}
    assert labels(panels_of(recorded(one), 20)[2]) == ["all processes"]
    two = one | {("cpu", "worker"): flat(1)}
    assert labels(panels_of(recorded(two), 20)[2]) == ["all processes", "main", "worker"]


def test_order_of_roles() -> None:
    names = ["other", "rank10", "worker", "rank2", "main"]
    found = roles_in_order(recorded({("cpu", name): flat(1) for name in names}))
    assert found == ["main", "rank2", "rank10", "worker", "other"]


def test_high_context_lines_are_hidden() -> None:
    series = {("cpu", "tree"): flat(2), ("host_cpu", "host"): flat(60)}
    cpu = panels_of(recorded(series, allowed=4), 20)[2]
    assert labels(cpu, shown=True) == ["all processes", "allowed"]
    assert labels(cpu, shown=False) == ["host"]
    assert cpu.full_scale == 4
    assert cpu.detail == "right axis: % of the 4 allowed cores"


def test_cgroup_limit_is_a_level() -> None:
    series = {("memory", "tree"): flat(2 << 30), ("cgroup_memory_limit", "cgroup"): flat(4 << 30)}
    memory = panels_of(recorded(series), 20)[0]
    assert memory.lines[-1].label == "limit"
    assert memory.lines[-1].y.tolist() == [4, 4]
    assert memory.detail == "limit 4.00 GiB"


def test_network_is_the_sum_over_namespaces() -> None:
    series = {("net_received", "net:1"): flat(3), ("net_received", "net:2"): flat(4, count=10)}
    total = network(recorded(series), "net_received")
    assert total.value.tolist() == [7] * 10 + [3] * 10
    assert total.window.tolist() == [1] * 20


def test_rate_over_a_very_short_window_is_not_drawn() -> None:
    t = np.array([1.0, 2.0, 3.0, 3.001]) * SECOND
    cpu = Series(t.astype(np.int64), np.array([1, 1, 1, 0.001]), np.array([1.0, 1, 1, 900]))
    line = panels_of(recorded({("cpu", "tree"): cpu}), 4)[2].lines[0]
    assert line.y.tolist() == [1, 1, 1]
