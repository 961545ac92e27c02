"""The output of `stepscope doctor`: sensors, self-test and machine."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.doctor.checks import NOT_TESTED, CheckResult
from stepscope.doctor.run import DoctorReport, SensorState
from stepscope.metrics import BY_KEY
from stepscope.report.kit.document import Block, Paragraph, Section, Verbatim
from stepscope.report.kit.outcomes import Tone
from stepscope.report.kit.table import Column, Table

_TONES: dict[str, Tone] = {
    **dict.fromkeys(("works", "ok"), "good"),
    **dict.fromkeys(("partial", "missing", "not tested", "note"), "warning"),
    **dict.fromkeys(("wrong", "problem"), "bad"),
}

Row = tuple[Sequence[str], str, tuple[str, ...]]
"""Names that share a row, their state, and further cells."""


def blocks_of(report: DoctorReport, run: str) -> list[Block]:
    """Return all blocks. `run` is the path of the run of the self-test, if it was kept."""
    remarks: list[Row] = [
        ([each.topic], each.level, ("\n→ ".join(filter(None, (each.text, each.hint))),))
        for each in report.machine
    ]
    if wrong := [result.name for result in report.self_test if result.state == "wrong"]:
        conclusion = f"Wrong readings: {', '.join(wrong)}."
    elif report.self_test:
        conclusion = "All tested sensors are correct."
    else:
        conclusion = "The accuracy of the sensors was not tested (--quick)."
    if report.monitor_cores is not None:
        conclusion += f" Monitoring overhead: {report.monitor_cores * 100:.1f}% of one core."
    return [
        Section("Sensors", (_costs(report.sensors), _missing(report.sensors))),
        Section("Self-test", (_results(report.self_test),)),
        Section("Machine", (_table(("", "", ""), remarks),)),
        Paragraph(conclusion),
        Verbatim(run, "Run:"),
    ]


def _table(titles: Sequence[str], rows: Sequence[Row], numbers: bool = False) -> Table:
    """A table of names, colored states, and texts or numbers."""
    return Table(
        (
            Column(titles[0], number=False),
            Column(titles[1], number=False, colored=True),
            *(Column(title, number=numbers) for title in titles[2:]),
        ),
        tuple(
            (names[0] if len(names) == 1 else f"{names[0]}, {len(names) - 1} more", state, *texts)
            for names, state, texts in rows
        ),
        tuple(_TONES[row[1]] for row in rows),
    )


def _costs(sensors: Sequence[SensorState]) -> Table:
    """The sensors that were read, with their cost."""
    rows: list[Row] = [
        (
            [each.name],
            each.state,
            (f"{each.period_s:.2g} s", f"{each.cost_s * 1e6:,.0f} µs", f"{each.share * 100:.2f}%"),
        )
        for each in sensors
        if each.cost_s is not None and each.share is not None and each.state != "missing"
    ]
    titles = ("Sensor", "State", "Period", "CPU time per reading", "Share of one core")
    return _table(titles, rows, numbers=True)


def _missing(sensors: Sequence[SensorState]) -> Table:
    """Missing and estimated metrics with reasons and hints. Sensors that are missing for the same
    reason share a row."""
    groups: list[tuple[list[str], SensorState]] = []
    for sensor in sensors:
        if not sensor.missing and not sensor.estimated:
            continue
        before = groups[-1][1] if groups else sensor
        same = set(sensor.missing.values()) == set(before.missing.values())
        if groups and same and sensor.state == before.state == "missing":
            groups[-1][0].append(sensor.name)
        else:
            groups.append(([sensor.name], sensor))
    rows: list[Row] = []
    for names, sensor in groups:
        by_reason: dict[str, list[str]] = {}
        for metric, reason in sensor.missing.items():
            by_reason.setdefault(reason, []).append(BY_KEY[metric].label)
        lines = [
            reason if sensor.state == "missing" else f"{', '.join(metrics)}: {reason}"
            for reason, metrics in by_reason.items()
        ]
        lines += [f"→ {hint}" for hint in sensor.hints]
        lines += [f"estimated: {method}" for method in dict.fromkeys(sensor.estimated.values())]
        rows.append((names, sensor.state, ("\n".join(lines),)))
    return _table(("", "", ""), rows)


def _results(results: Sequence[CheckResult]) -> Table:
    rows: list[Row] = []
    skipped: dict[str, list[str]] = {}
    for result in results:
        if result.state == NOT_TESTED and not result.measured:
            skipped.setdefault(result.detail, []).append(result.name)
        else:
            measured = "\n".join(filter(None, (result.measured, result.detail)))
            rows.append(([result.name], result.state, (result.expected, measured)))
    rows += [(names, NOT_TESTED, ("", reason)) for reason, names in skipped.items()]
    return _table(("Check", "State", "Expected", "Measured"), rows)
