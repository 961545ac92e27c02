"""What is measured, what is missing, and which criteria hold, from the state alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from max_batch.cases import BASELINES, GIB, PREDICTED_GIB, Case
from max_batch.scan import (
    FULL_SPEED,
    Point,
    Truth,
    found_edge,
    next_batches,
    points_of,
    truth,
)
from max_batch.state import State

CLEAN, RAGGED = 0.99, 0.95
"""Share of the true max batch that `fit` must reach, for a clean and a ragged edge."""
RECOMMENDED = 0.97
"""Share of the true recommended batch that `fit` must reach."""
PREDICTION_ERROR = 0.03

Outcome = Literal["pass", "FAIL", "missing"]


@dataclass(frozen=True)
class Verdict:
    """Whether a criterion holds in a case."""

    criterion: str
    case: str
    outcome: Outcome
    detail: str = ""


class Findings:
    """Read access to a state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def answer(self, case: Case) -> dict[str, Any] | None:
        record = self.state.get(case.name, "fit")
        return record["answer"] if record else None

    def batches(self, case: Case) -> tuple[int, int] | None:
        """Return the max and the recommended batch size of `fit`."""
        answer = self.answer(case)
        if not answer or not answer.get("max_batch"):
            return None
        max_batch = answer["max_batch"]
        recommended = answer.get("recommended_batch") or max_batch
        return int(max_batch["size"]), int(recommended["size"])

    def points(self, case: Case) -> dict[int, Point]:
        return points_of(self.state.points(case.name))

    def scan_batches(self, case: Case) -> list[int]:
        batches = self.batches(case)
        if batches is None:
            return []
        return next_batches(*batches, self.points(case), thorough=case.group != "sizes")

    def truth(self, case: Case) -> Truth | None:
        """Return the result of the scan if it is complete."""
        return truth(self.points(case)) if self.is_done(case, "scan") else None

    def baseline(self, case: Case, name: str) -> int | None:
        record = self.state.get(case.name, name)
        return int(record["batch"]) if record else None

    def throughput_batches(self, case: Case) -> list[int]:
        """Return the answers of the baselines that were not trained yet."""
        found = (self.baseline(case, name) for name in BASELINES)
        points = self.points(case)
        return list(dict.fromkeys(batch for batch in found if batch and batch not in points))

    def is_done(self, case: Case, item: str) -> bool:
        """Return whether an item is complete and belongs to the current answer of `fit`."""
        batches = self.batches(case)
        if item == "scan":
            return batches is not None and not self.scan_batches(case)
        if item == "throughput":
            known = all(self.baseline(case, name) is not None for name in BASELINES)
            return known and not self.throughput_batches(case)
        record = self.state.get(case.name, item)
        if item in ("repeats", "long"):
            batch = batches and batches[item == "long"]
            return record is not None and record["batch"] == batch
        return record is not None

    def missing(self, cases: Sequence[Case]) -> list[str]:
        return [f"{c.name}: {i}" for c in cases for i in c.items if not self.is_done(c, i)]


def verdicts(findings: Findings, cases: Sequence[Case]) -> Iterator[Verdict]:
    """Yield all verdicts, criterion by criterion."""
    for case in cases:
        yield _max_batch(findings, case)
    for case in cases:
        yield _recommended_batch(findings, case)
    for case in cases:
        if "lightning_binsearch" in case.items:
            yield _seconds(findings, case)
    for case in cases:
        if "long" in case.items:
            yield _long(findings, case)
    for case in cases:
        if "predictions" in case.items:
            yield from _predictions(findings, case, cases)


def _judged(criterion: str, case: Case, good: bool, detail: str) -> Verdict:
    return Verdict(criterion, case.name, "pass" if good else "FAIL", detail)


def _max_batch(findings: Findings, case: Case) -> Verdict:
    name = "1 max batch"
    batches, true = findings.batches(case), findings.truth(case)
    if batches is None or true is None or not findings.is_done(case, "repeats"):
        return Verdict(name, case.name, "missing")
    record = findings.state.get(case.name, "repeats") or {}
    passed = sum(bool(each["passed"]) for each in record["runs"])
    share = batches[0] / true.max_batch
    good = passed == 3 and share >= (RAGGED if true.ragged else CLEAN)
    edge = "ragged" if true.ragged else "clean"
    detail = f"{batches[0]} of {true.max_batch} ({share:.1%}, {edge}), {passed}/3 passed"
    if not found_edge(batches[0], findings.points(case), case.group != "sizes"):
        good, detail = False, f"{detail}; the edge was not found"
    limit = ((findings.answer(case) or {}).get("budget") or {}).get("limit_bytes", case.cap)
    if limit != case.cap:
        detail += f"; fit used {limit / GIB:.2f} GiB, the scan {case.gib} GiB"
    return _judged(name, case, good, detail)


def _recommended_batch(findings: Findings, case: Case) -> Verdict:
    name = "1 recommended"
    batches, true = findings.batches(case), findings.truth(case)
    point = findings.points(case).get(batches[1]) if batches else None
    if batches is None or true is None or point is None:
        return Verdict(name, case.name, "missing")
    speed = point.rate / true.best_rate if true.best_rate else 0.0
    good = point.retry_free and speed >= FULL_SPEED
    good = good and batches[1] >= RECOMMENDED * true.recommended
    how = f"{point.retries} retries" if point.passed else "does not pass"
    detail = f"{batches[1]} of {true.recommended}, {how}, {speed:.1%} of the best throughput"
    return _judged(name, case, good, detail)


def _seconds(findings: Findings, case: Case) -> Verdict:
    name = "2 seconds"
    fit = findings.state.get(case.name, "fit")
    lightning = findings.state.get(case.name, "lightning_binsearch")
    if fit is None or lightning is None or "shared" in fit or "shared" in lightning:
        return Verdict(name, case.name, "missing")
    detail = f"{fit['seconds']:.1f} s, binsearch {lightning['seconds']:.1f} s"
    return _judged(name, case, fit["seconds"] <= lightning["seconds"], detail)


def _long(findings: Findings, case: Case) -> Verdict:
    name = "3 long run"
    if not findings.is_done(case, "long"):
        return Verdict(name, case.name, "missing")
    record = (findings.state.get(case.name, "long") or {})["runs"][0]
    good = record["passed"] and not record["retries"]
    how = f"{record['retries']} retries" if record["passed"] else f"failed in {record['where']}"
    return _judged(name, case, good, f"100 steps at {record['batch']}: {how}")


def _predictions(findings: Findings, case: Case, cases: Sequence[Case]) -> Iterator[Verdict]:
    predicted = predictions_of(findings, case)
    for gib in PREDICTED_GIB:
        criterion = f"4 prediction {gib} GiB"
        scanned = next((c for c in cases if c.model == case.model and c.gib == gib), None)
        true = findings.truth(scanned) if scanned else None
        prediction = predicted.get(gib)
        if prediction is None or true is None:
            yield Verdict(criterion, case.name, "missing")
            continue
        error = prediction["max_batch"] / true.max_batch - 1
        detail = f"{prediction['max_batch']} predicted, {true.max_batch} true ({error:+.1%})"
        limit = prediction["limit_bytes"]
        if limit != prediction["memory_bytes"]:
            detail += f"; predicted for {limit / GIB:.2f} GiB"
        yield _judged(criterion, case, abs(error) <= PREDICTION_ERROR, detail)


def predictions_of(findings: Findings, case: Case) -> dict[int, dict[str, Any]]:
    """Return the predictions for other memory sizes, by GiB."""
    record = findings.state.get(case.name, "predictions") or {}
    return {round(each["memory_bytes"] / GIB): each for each in record.get("predictions", ())}
