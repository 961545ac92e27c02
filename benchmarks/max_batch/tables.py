"""Output of the benchmark: lists, comparisons with published tables, and the result file."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import results_file
from max_batch.cases import BASELINES, GIB, PREDICTED_GIB, SIZED, Case
from max_batch.criteria import Findings, Outcome, predictions_of, verdicts
from max_batch.scan import Truth

PAPER = Path(__file__).parents[1] / "data"
THESIS_NAMES = {"r3d_18": "conv3d"}
"""The corresponding model of the thesis, where its name differs."""
TITLES = {
    "fit": "fit, max",
    "recommended": "fit, recommended",
    "linear2019": "linear2019",
    "lightning_binsearch": "Lightning binsearch",
    "lightning_power": "Lightning power",
    "accelerate": "Accelerate",
}
NONE = "–"


def listed(findings: Findings, cases: Sequence[Case], _: Path) -> str:
    """Return what is measured and what is missing, and the verdict of each criterion."""
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
    lines.append("\nItems in parentheses are missing.\n")
    lines += [
        f"{v.outcome:8} {v.criterion:18} {v.case:28} {v.detail}" for v in verdicts(findings, cases)
    ]
    return "\n".join([*lines, "", _tally(findings, cases)])


def written(findings: Findings, cases: Sequence[Case], folder: Path) -> str:
    """Write the result file, and return the tables as Markdown."""
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
        ("Max batch size at 15 GiB (Table 5.1)", _table_5_1(findings, cases)),
        ("Duration and out-of-memory errors", _costs(findings, cases)),
        ("Throughput at each answer (samples/s)", _throughput(findings, cases)),
        ("Other memory sizes (Table 5.2)", _table_5_2(findings, cases)),
        ("Predictions from probes without a limit", _predictions(findings, cases)),
        ("Other models at 15 GiB, bf16", _others(findings, cases)),
        ("Duration compared with manual doubling (Table 5.8)", _table_5_8(findings, cases)),
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
        published = paper.get(THESIS_NAMES.get(case.model, case.model), {})
        true = findings.truth(case)
        row = [case.model, *(published.get(key, NONE) for key in ("estimated", "actual"))]
        row.append(f"{published['error_percent']}%" if published else NONE)
        row.append(f"{true.max_batch}{' (ragged)' if true.ragged else ''}" if true else NONE)
        row += [
            _with_error(batch, true.max_batch if true else None)
            for batch in _answers(findings, case).values()
        ]
        rows.append(row)
    return _markdown(head, rows) + (
        "\n\nErrors are 100·(actual − estimate)/actual, as in the thesis: negative is too high. "
        "linear2019 is without a reserve; conv3d of the thesis is compared with r3d_18."
    )


def _costs(findings: Findings, cases: Sequence[Case]) -> str:
    methods = ("fit", *BASELINES)
    rows = []
    for case in _of_group(cases, "papers"):
        row = [case.model]
        for method in methods:
            record = findings.state.get(case.name, method)
            failure = findings.state.failure(case.name, method)
            row.append(_cost(record) if record else "failed" if failure else NONE)
        rows.append(row)
    return _markdown(["model", *(TITLES[method].split(",")[0] for method in methods)], rows)


def _cost(record: dict[str, Any]) -> str:
    ooms = record.get("ooms", ((record.get("answer") or {}).get("cost") or {}).get("ooms"))
    return f"{record['seconds']:.1f} s, {NONE if ooms is None else ooms}"


def _throughput(findings: Findings, cases: Sequence[Case]) -> str:
    rows = []
    for case in _of_group(cases, "papers"):
        true, row = findings.truth(case), [case.model]
        row.append(f"{true.best_rate:,.0f}" if true else NONE)
        for batch in _answers(findings, case).values():
            point = findings.points(case).get(batch) if batch else None
            row.append(_rate(point))
        rows.append(row)
    return _markdown(["model", "best in the scan", *TITLES.values()], rows)


def _rate(point: Any) -> str:
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
        published = paper.get(model, {})
        row = [model, *(published.get(f"estimated_{gb}gb", NONE) for gb in (11, 16))]
        for gib in sizes:
            case = next((c for c in cases if (c.model, c.gib) == (model, gib)), None)
            row.append(_answers_and_truth(findings, case) if case else NONE)
        rows.append(row)
    columns = [f"{gib} GiB" for gib in sizes]
    return _markdown(["model", "2019: 11 GB", "2019: 16 GB", *columns], rows) + (
        "\n\nEach cell: max / recommended batch size of fit (of the scan)."
    )


def _answers_and_truth(findings: Findings, case: Case) -> str:
    batches, true = findings.batches(case), findings.truth(case)
    if batches is None:
        return NONE
    return f"{batches[0]} / {batches[1]} ({_truth_text(true)})"


def _truth_text(true: Truth | None) -> str:
    return f"{true.max_batch} / {true.recommended}" if true else NONE


def _predictions(findings: Findings, cases: Sequence[Case]) -> str:
    rows = []
    for case in (case for case in cases if "predictions" in case.items):
        predicted = predictions_of(findings, case)
        row = [case.model]
        for gib in PREDICTED_GIB:
            scanned = next((c for c in cases if (c.model, c.gib) == (case.model, gib)), None)
            true = findings.truth(scanned) if scanned else None
            prediction = predicted.get(gib)
            batch = prediction["max_batch"] if prediction else None
            row.append(_with_error(batch, true.max_batch if true else None))
        limits = {gib: each["limit_bytes"] / GIB for gib, each in predicted.items()}
        row.append(", ".join(f"{limit:.2f}" for limit in limits.values()) or NONE)
        rows.append(row)
    return _markdown(["model", *(f"{gib} GiB" for gib in PREDICTED_GIB), "for batches (GiB)"], rows)


def _others(findings: Findings, cases: Sequence[Case]) -> str:
    rows = []
    for case in _of_group(cases, "others"):
        record = findings.state.get(case.name, "fit")
        true = findings.truth(case)
        best = f"{true.best_rate:,.0f}" if true else NONE
        seconds = f"{record['seconds']:.1f} s" if record else NONE
        rows.append([case.model, _answers_and_truth(findings, case), best, seconds])
    return _markdown(
        ["model", "max / recommended of fit (scan)", "best samples/s", "duration"], rows
    )


def _table_5_8(findings: Findings, cases: Sequence[Case]) -> str:
    paper = _read("tripathi2019_table5_8_search_time.csv")
    head = ["model", "2019: manual", "2019: algorithm", "manual", "linear2019", "fit"]
    rows = []
    for case in (case for case in cases if "manual" in case.items):
        published, state = paper.get(case.model, {}), findings.state
        row = [case.model]
        row += [
            f"{published[f'{way}_seconds']} s, {published[f'{way}_batch']}" if published else NONE
            for way in ("manual", "algorithm")
        ]
        manual, linear = state.get(case.name, "manual"), state.get(case.name, "linear2019")
        row.append(
            f"{manual['seconds']:.0f} s ({manual['training_seconds']:.0f} s of training), "
            f"{manual['batch']}"
            if manual
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
    """Return the answer of each method."""
    max_batch, recommended = findings.batches(case) or (None, None)
    baselines = {name: findings.baseline(case, name) for name in BASELINES}
    found: dict[str, int | None] = {"fit": max_batch, "recommended": recommended, **baselines}
    return {name: found[name] for name in TITLES}


def _with_error(batch: int | None, true: int | None) -> str:
    if not batch:
        return NONE
    return f"{batch} ({100 * (true - batch) / true:.1f}%)" if true else str(batch)


def _of_group(cases: Sequence[Case], group: str) -> list[Case]:
    return [case for case in cases if case.group == group]


def _read(name: str) -> dict[str, dict[str, str]]:
    with (PAPER / name).open(newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
