"""What the doctor shows: the sensors with their costs and losses, the self-test, surroundings."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.doctor.checks import NOT_TRIED, CheckResult
from stepscope.doctor.examine import DoctorReport, SensorState
from stepscope.metrics import BY_KEY
from stepscope.report.kit.document import Block, Paragraph, Section, Verbatim
from stepscope.report.kit.outcomes import Tone
from stepscope.report.kit.table import Column, Table

_TONES: dict[str, Tone] = {
    **dict.fromkeys(("works", "ok", "fine"), "good"),
    **dict.fromkeys(("in part", "missing", "not tried", "note"), "warning"),
    **dict.fromkeys(("wrong", "bites"), "bad"),
}

Row = tuple[Sequence[str], str, tuple[str, ...]]
"""Names that share a line, a state, and texts."""


def blocks_of(report: DoctorReport, run: str) -> list[Block]:
    """All of it; `run` is where the run of the self-test is, if it was kept."""
    remarks: list[Row] = [
        ([each.topic], each.level, ("\n→ ".join(filter(None, (each.text, each.hint))),))
        for each in report.surroundings
    ]
    if wrong := [result.name for result in report.verdicts if result.state == "wrong"]:
        conclusion = f"Do not trust: {', '.join(wrong)}."
    elif report.verdicts:
        conclusion = "What was tested tells the truth."
    else:
        conclusion = "Whether they tell the truth was not tested (--quick)."
    if report.watcher_cores is not None:
        conclusion += f" Watching took {report.watcher_cores * 100:.1f} % of one core."
    return [
        Section("Sensors", (_costs(report.sensors), _losses(report.sensors))),
        Section("Self-test", (_results(report.verdicts),)),
        Section("Surroundings", (_table(("", "", ""), remarks),)),
        Paragraph(conclusion),
        Verbatim(run, "Run:"),
    ]


def _table(titles: Sequence[str], rows: Sequence[Row], numbers: bool = False) -> Table:
    """A first column of names, a second of states in their colour, and texts or numbers."""
    return Table(
        (
            Column(titles[0], number=False),
            Column(titles[1], number=False, toned=True),
            *(Column(title, number=numbers) for title in titles[2:]),
        ),
        tuple(
            (names[0] if len(names) == 1 else f"{names[0]}, {len(names) - 1} more", state, *texts)
            for names, state, texts in rows
        ),
        tuple(_TONES[row[1]] for row in rows),
    )


def _costs(sensors: Sequence[SensorState]) -> Table:
    """The sensors that were read, with what that took."""
    rows: list[Row] = [
        (
            [each.name],
            each.state,
            (f"{each.period_s:.2g} s", f"{each.cost_s * 1e6:,.0f} µs", f"{each.share * 100:.2f} %"),
        )
        for each in sensors
        if each.cost_s is not None and each.share is not None and each.state != "missing"
    ]
    titles = ("sensor", "", "every", "CPU time a reading", "of one core")
    return _table(titles, rows, numbers=True)


def _losses(sensors: Sequence[SensorState]) -> Table:
    """What is missing and why, what would help, what is estimated. Sensors that are missing for
    the same reason share a line."""
    alike: list[tuple[list[str], SensorState]] = []
    for sensor in sensors:
        if not sensor.missing and not sensor.estimated:
            continue
        before = alike[-1][1] if alike else sensor
        same = set(sensor.missing.values()) == set(before.missing.values())
        if alike and same and sensor.state == before.state == "missing":
            alike[-1][0].append(sensor.name)
        else:
            alike.append(([sensor.name], sensor))
    rows: list[Row] = []
    for names, sensor in alike:
        by_reason: dict[str, list[str]] = {}
        for metric, reason in sensor.missing.items():
            by_reason.setdefault(reason, []).append(BY_KEY[metric].label)
        lines = [
            reason if sensor.state == "missing" else f"{', '.join(metrics)}: {reason}"
            for reason, metrics in by_reason.items()
        ]
        lines += [f"→ {hint}" for hint in sensor.hints]
        lines += [f"estimated: {how}" for how in dict.fromkeys(sensor.estimated.values())]
        rows.append((names, sensor.state, ("\n".join(lines),)))
    return _table(("", "", ""), rows)


def _results(results: Sequence[CheckResult]) -> Table:
    rows: list[Row] = []
    skipped: dict[str, list[str]] = {}
    for result in results:
        if result.state == NOT_TRIED and not result.seen:
            skipped.setdefault(result.detail, []).append(result.name)
        else:
            seen = "\n".join(filter(None, (result.seen, result.detail)))
            rows.append(([result.name], result.state, (result.expected, seen)))
    rows += [(names, NOT_TRIED, ("", reason)) for reason, names in skipped.items()]
    return _table(("check", "", "expected", "seen"), rows)
