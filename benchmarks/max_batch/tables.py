"""What the benchmark found, for people: lists, the papers' tables beside ours, the result file."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import results_file
from max_batch.cases import CARDS, GIB, RIVALS, SIZED, Case
from max_batch.criteria import Findings, Outcome, cards_of, verdicts

PAPER = Path(__file__).parents[1] / "data"
NAMED_OTHERWISE = {"r3d_18": "conv3d"}
"""What a model of ours stands for in the thesis."""
TITLES = {
    "fit": "fit, largest",
    "fast": "fit, fast",
    "linear2019": "linear2019",
    "lightning_binsearch": "Lightning binsearch",
    "lightning_power": "Lightning power",
    "accelerate": "Accelerate",
}
NONE = "–"


def listed(findings: Findings, cases: Sequence[Case], _: Path) -> str:
    """Work that is done and missing, then criterion by criterion."""
    lines = []
    for case in cases:
        signs = []
        for item in case.items:
            failure = findings.state.failure(case.name, item)
            done = findings.is_done(case, item)
            signs.append(item if done else f"({item}{' FAILED' if failure else ''})")
        lines.append(f"{case.name:28} {' '.join(signs)}")
        lines += [
            f"{'':28} {item}: {failure}"
            for item in case.items
            if (failure := findings.state.failure(case.name, item))
            and not findings.is_done(case, item)
        ]
    lines.append("\nWhat is in brackets is missing.\n")
    lines += [
        f"{v.outcome:8} {v.criterion:18} {v.case:28} {v.detail}" for v in verdicts(findings, cases)
    ]
    return "\n".join([*lines, "", _tally(findings, cases)])


def written(findings: Findings, cases: Sequence[Case], folder: Path) -> str:
    """The tables, as Markdown; and the result file, which has the figures."""
    figures = {
        "commands": findings.state.commands,
        "criteria": [dataclasses.asdict(verdict) for verdict in verdicts(findings, cases)],
        "missing": findings.missing(cases),
        "truth": {
            case.name: dataclasses.asdict(true) for case in cases if (true := findings.truth(case))
        },
        "measured": findings.state.measured,
    }
    path = results_file.write("max_batch", figures, folder, findings.state.machine)
    parts = [
        ("Criteria", _criteria(findings, cases)),
        ("The largest batch at 15 GiB (Table 5.1)", _table_5_1(findings, cases)),
        ("Seconds, and OOMs suffered", _efforts(findings, cases)),
        ("Samples per second at each one's answer", _speeds(findings, cases)),
        ("Other sizes of memory (Table 5.2)", _table_5_2(findings, cases)),
        ("Other cards, from probes at full memory", _cards(findings, cases)),
        ("Other models at 15 GiB, bf16", _others(findings, cases)),
        ("Time against doubling by hand (Table 5.8)", _table_5_8(findings, cases)),
    ]
    missing = findings.missing(cases)
    text = "\n".join(f"### {title}\n\n{table}\n" for title, table in parts)
    text += f"\nMissing: {'; '.join(missing) or 'nothing'}.\n"
    return f"{text}\nwritten: {path.name}"


def _tally(findings: Findings, cases: Sequence[Case]) -> str:
    found = list(verdicts(findings, cases))
    names = list(dict.fromkeys(verdict.criterion for verdict in found))
    lines = []
    for name in names:
        outcomes = [verdict.outcome for verdict in found if verdict.criterion == name]
        counts = (f"{outcomes.count(outcome)} {outcome}" for outcome in get_args(Outcome))
        lines.append(f"{name:18} {', '.join(counts)}")
    return "\n".join(lines)


def _criteria(findings: Findings, cases: Sequence[Case]) -> str:
    rows = [[v.criterion, v.case, v.outcome, v.detail or NONE] for v in verdicts(findings, cases)]
    return _markdown(["criterion", "case", "", ""], rows)


def _table_5_1(findings: Findings, cases: Sequence[Case]) -> str:
    paper = _read("tripathi2019_table5_1_max_batch.csv")
    head = ["model", "2019: estimated", "actual", "error", "truth", *TITLES.values()]
    rows = []
    for case in _of_group(cases, "papers"):
        told = paper.get(NAMED_OTHERWISE.get(case.model, case.model), {})
        true = findings.truth(case)
        row = [case.model, *(told.get(key, NONE) for key in ("estimated", "actual"))]
        row.append(f"{told['error_percent']} %" if told else NONE)
        row.append(f"{true.largest}{' (ragged)' if true.ragged else ''}" if true else NONE)
        row += [
            _with_error(batch, true.largest if true else None)
            for batch in _answers(findings, case).values()
        ]
        rows.append(row)
    return _markdown(head, rows) + (
        "\n\nErrors are 100·(actual − estimate)/actual, as in the thesis: minus is too high. "
        "linear2019 is without a reserve; its conv3d is compared with r3d_18."
    )


def _efforts(findings: Findings, cases: Sequence[Case]) -> str:
    finders = ("fit", *RIVALS)
    rows = []
    for case in _of_group(cases, "papers"):
        row = [case.model]
        for finder in finders:
            told = findings.state.get(case.name, finder)
            failure = findings.state.failure(case.name, finder)
            row.append(_effort(told) if told else "failed" if failure else NONE)
        rows.append(row)
    return _markdown(["model", *(TITLES[f].split(",")[0] for f in finders)], rows)


def _effort(told: dict[str, Any]) -> str:
    ooms = told.get("ooms", ((told.get("answer") or {}).get("effort") or {}).get("ooms"))
    return f"{told['seconds']:.1f} s, {NONE if ooms is None else ooms}"


def _speeds(findings: Findings, cases: Sequence[Case]) -> str:
    rows = []
    for case in _of_group(cases, "papers"):
        true, row = findings.truth(case), [case.model]
        row.append(f"{true.best_rate:,.0f}" if true else NONE)
        for batch in _answers(findings, case).values():
            point = findings.points(case).get(batch) if batch else None
            row.append(_speed(point))
        rows.append(row)
    return _markdown(["model", "best in the scan", *TITLES.values()], rows)


def _speed(point: Any) -> str:
    if point is None:
        return NONE
    if not point.passed:
        return "OOM"
    return f"{point.rate:,.0f}" + (f" ({point.retries} retries)" if point.retries else "")


def _table_5_2(findings: Findings, cases: Sequence[Case]) -> str:
    paper = _read("tripathi2019_table5_2_max_batch_by_gpu_memory.csv")
    sizes = sorted({case.gib for case in cases if case.model in SIZED})
    models = list(dict.fromkeys(case.model for case in cases if case.precision == "tf32"))
    rows = []
    for model in models:
        told = paper.get(model, {})
        row = [model, told.get("estimated_11gb", NONE), told.get("estimated_16gb", NONE)]
        for gib in sizes:
            case = next((c for c in cases if (c.model, c.gib) == (model, gib)), None)
            row.append(_largest_fast_true(findings, case) if case else NONE)
        rows.append(row)
    ours = [f"{gib} GiB" for gib in sizes]
    return _markdown(["model", "2019: 11 GB", "2019: 16 GB", *ours], rows) + (
        "\n\nOurs: fit's largest / fast (the scan's largest / fast)."
    )


def _largest_fast_true(findings: Findings, case: Case) -> str:
    batches, true = findings.batches(case), findings.truth(case)
    if batches is None:
        return NONE
    return f"{batches[0]} / {batches[1]} ({f'{true.largest} / {true.fast}' if true else NONE})"


def _cards(findings: Findings, cases: Sequence[Case]) -> str:
    rows = []
    for case in (case for case in cases if "cards" in case.items):
        predicted = cards_of(findings, case)
        row = [case.model]
        for gib in CARDS:
            scanned = next((c for c in cases if (c.model, c.gib) == (case.model, gib)), None)
            true = findings.truth(scanned) if scanned else None
            card = predicted.get(gib)
            row.append(
                _with_error(card["largest"] if card else None, true.largest if true else None)
            )
        limits = {gib: card["limit"] / GIB for gib, card in predicted.items()}
        row.append(", ".join(f"{limit:.2f}" for limit in limits.values()) or NONE)
        rows.append(row)
    return _markdown(["model", *(f"{gib} GiB" for gib in CARDS), "for batches, GiB"], rows)


def _others(findings: Findings, cases: Sequence[Case]) -> str:
    rows = []
    for case in _of_group(cases, "others"):
        told = findings.state.get(case.name, "fit")
        true = findings.truth(case)
        best = f"{true.best_rate:,.0f}" if true else NONE
        seconds = f"{told['seconds']:.1f} s" if told else NONE
        rows.append([case.model, _largest_fast_true(findings, case), best, seconds])
    return _markdown(["model", "fit (scan): largest / fast", "best samples/s", "fit takes"], rows)


def _table_5_8(findings: Findings, cases: Sequence[Case]) -> str:
    paper = _read("tripathi2019_table5_8_search_time.csv")
    head = ["model", "2019: by hand", "2019: algorithm", "by hand", "linear2019", "fit"]
    rows = []
    for case in (case for case in cases if "manual" in case.items):
        told, state = paper.get(case.model, {}), findings.state
        row = [case.model]
        row += [
            f"{told[f'{way}_seconds']} s, {told[f'{way}_batch']}" if told else NONE
            for way in ("manual", "algorithm")
        ]
        hand, linear = state.get(case.name, "manual"), state.get(case.name, "linear2019")
        row.append(
            f"{hand['seconds']:.0f} s ({hand['training_seconds']:.0f} s of training), "
            f"{hand['batch']}"
            if hand
            else NONE
        )
        row.append(f"{linear['seconds']:.1f} s, {linear['batch']}" if linear else NONE)
        fit, batches = state.get(case.name, "fit"), findings.batches(case)
        row.append(
            f"{fit['seconds']:.1f} s, {batches[0]} / {batches[1]}" if fit and batches else NONE
        )
        rows.append(row)
    return _markdown(head, rows)


def _answers(findings: Findings, case: Case) -> dict[str, int | None]:
    """The batch that each way gives, by its name."""
    largest, fast = findings.batches(case) or (None, None)
    rivals = {rival: findings.rival(case, rival) for rival in RIVALS}
    found: dict[str, int | None] = {"fit": largest, "fast": fast, **rivals}
    return {name: found[name] for name in TITLES}


def _with_error(batch: int | None, true: int | None) -> str:
    if not batch:
        return NONE
    return f"{batch} ({100 * (true - batch) / true:.1f} %)" if true else str(batch)


def _of_group(cases: Sequence[Case], group: str) -> list[Case]:
    return [case for case in cases if case.group == group]


def _read(name: str) -> dict[str, dict[str, str]]:
    with (PAPER / name).open(newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
