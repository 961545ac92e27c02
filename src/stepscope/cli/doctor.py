"""`stepscope doctor`: which sensors work here, what they cost, and whether they tell the truth."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.cli.options import RUNS_VARIABLE
from stepscope.cli.run import near, say
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stepscope.doctor.examine import Findings
    from stepscope.doctor.sensors import SensorState
    from stepscope.doctor.surroundings import Remark
    from stepscope.doctor.verdicts import Verdict

_INTERRUPTED = 130
_COLOURS = {
    "works": "green", "in part": "yellow", "missing": "yellow",
    "ok": "green", "wrong": "bold red", "not tried": "yellow",
    "fine": "green", "note": "yellow", "bites": "bold red",
}  # fmt: skip


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Without the self-test: about three seconds.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to test the disk, and where --keep puts the run.", metavar="DIR"),
    ] = None,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="Let the GPU rest.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the run of the self-test, with its report.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")] = False,
) -> None:
    """Say which sensors work here, what each costs, and whether they tell the truth.

    For the last, work of known size is done under watch: CPU time, in a child process too, memory,
    disk, network, and on an NVIDIA GPU copies and matrix products. What the sensors saw is compared
    with what was done. Exit code 1: a sensor does not tell the truth. One that is missing is no
    fault.
    """
    from stepscope.capture.spawn import give_signals_back, take_signals

    signals = take_signals()
    from stepscope.doctor.examine import Examination, examine

    if not as_json and sys.stderr.isatty():
        say("looking around …" if quick else "testing for about 10 s, or 30 s with a GPU …")
    runs = Path(os.environ.get(RUNS_VARIABLE, DEFAULT_FOLDER))
    try:
        findings = examine(Examination(out, runs, quick, not no_gpu, keep), signals)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    give_signals_back(signals)
    with contextlib.suppress(BrokenPipeError, SystemExit):  # nobody reads it (rich leaves then)
        if as_json:
            sys.stdout.write(json.dumps(as_dict(findings)) + "\n")
        else:
            from rich.console import Console

            print_findings(Console(), findings)
        sys.stdout.flush()
    raise typer.Exit(0 if findings.truthful else 1)


def as_dict(findings: Findings) -> dict[str, Any]:
    """All findings, ready for JSON."""
    return {
        "ok": findings.truthful,
        "sensors": [
            {**dataclasses.asdict(sensor), "core_share": sensor.share}
            for sensor in findings.sensors
        ],
        "watcher_cores": findings.watcher_cores,
        "self_test": [dataclasses.asdict(verdict) for verdict in findings.verdicts],
        "surroundings": [dataclasses.asdict(remark) for remark in findings.surroundings],
        "run": str(findings.run) if findings.run else None,
    }


def print_findings(console: Console, findings: Findings) -> None:
    """Three parts, and what follows from them."""
    from rich.text import Text

    parts = [("Sensors", [_costs(findings.sensors), _losses(findings.sensors)])]
    if findings.verdicts:
        parts.append(("Self-test", [_verdicts(findings.verdicts)]))
    parts.append(("Surroundings", [_surroundings(findings.surroundings)]))
    for title, tables in parts:
        console.print(Text(title, "bold"))
        for table in tables:
            if table.row_count:
                console.print(table)
                console.print()
    console.print(Text(_conclusion(findings)))
    if findings.run is not None:
        # Not wrapped: a path must be one word to be clicked or copied.
        console.print(Text(f"Run: {near(findings.run)}"), soft_wrap=True)


def _costs(sensors: Sequence[SensorState]) -> Table:
    """The sensors that were read, with what that took."""
    table = _table("sensor", "", "every", "CPU time a reading", "of one core")
    for column in table.columns[2:]:
        column.justify = "right"
    for sensor in sensors:
        if sensor.cost_s is not None and sensor.period_s and sensor.state != "missing":
            every, cost = f"{sensor.period_s:.2g} s", f"{sensor.cost_s * 1e6:,.0f} µs"
            share = f"{sensor.cost_s / sensor.period_s * 100:.2f} %"
            _add(table, [sensor.name], sensor.state, every, cost, share)
    return table


def _losses(sensors: Sequence[SensorState]) -> Table:
    """What is missing and why, what would help, what is estimated."""
    table = _table("", "", "")
    for names, sensor in _alike(sensors):
        if sensor.missing or sensor.estimated:
            _add(table, names, sensor.state, "\n".join(_explained(sensor)))
    return table


def _alike(sensors: Sequence[SensorState]) -> list[tuple[list[str], SensorState]]:
    """Sensors that are missing for the same reason share a line."""
    rows: list[tuple[list[str], SensorState]] = []
    for sensor in sensors:
        same = (
            rows
            and sensor.state == rows[-1][1].state == "missing"
            and set(sensor.missing.values()) == set(rows[-1][1].missing.values())
        )
        if same:
            rows[-1][0].append(sensor.name)
        else:
            rows.append(([sensor.name], sensor))
    return rows


def _explained(sensor: SensorState) -> list[str]:
    from stepscope.doctor.sensors import labels

    by_reason: dict[str, list[str]] = {}
    for metric, reason in sensor.missing.items():
        by_reason.setdefault(reason, []).append(metric)
    return [
        *(
            reason if sensor.state == "missing" else f"{labels(metrics)}: {reason}"
            for reason, metrics in by_reason.items()
        ),
        *(f"→ {hint}" for hint in sensor.hints),
        *(f"estimated: {how}" for how in dict.fromkeys(sensor.estimated.values())),
    ]


def _verdicts(verdicts: Sequence[Verdict]) -> Table:
    table = _table("check", "", "expected", "seen")
    skipped: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.state == "not tried" and not verdict.seen:
            skipped.setdefault(verdict.detail, []).append(verdict.name)
        else:
            seen = "\n".join(filter(None, (verdict.seen, verdict.detail)))
            _add(table, [verdict.name], verdict.state, verdict.expected, seen)
    for reason, names in skipped.items():
        _add(table, names, "not tried", "", reason)
    return table


def _surroundings(remarks: Sequence[Remark]) -> Table:
    table = _table("", "", "")
    for remark in remarks:
        text = f"{remark.text}\n→ {remark.hint}" if remark.hint else remark.text
        _add(table, [remark.topic], remark.level, text)
    return table


def _conclusion(findings: Findings) -> str:
    wrong = [verdict.name for verdict in findings.verdicts if verdict.state == "wrong"]
    cost = findings.watcher_cores
    watching = f" Watching took {cost * 100:.1f} % of one core." if cost is not None else ""
    if wrong:
        return f"Do not trust: {', '.join(wrong)}.{watching}"
    if not findings.verdicts:
        return f"Whether they tell the truth was not tested (--quick).{watching}"
    return f"What was tested tells the truth.{watching}"


def _table(*titles: str) -> Table:
    from rich.table import Table

    headed = any(titles)
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=headed
    )
    for title in titles:
        table.add_column(title)
    return table


def _add(table: Table, names: Sequence[str], state: str, *cells: str) -> None:
    from rich.text import Text

    name = names[0] if len(names) == 1 else f"{names[0]}, {len(names) - 1} more"
    table.add_row(Text(name), Text(state, _COLOURS[state]), *(Text(cell) for cell in cells))
