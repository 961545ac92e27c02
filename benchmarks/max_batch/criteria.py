"""What is done, what is missing, and which criteria hold: all of it from the state alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from max_batch.cases import CARDS, GIB, RIVALS, Case
from max_batch.scan import FULL_SPEED, Point, Truth, found_edge, points_of, truth, wanted
from max_batch.state import State

CLEAN, RAGGED = 0.99, 0.95
"""Of the largest batch that passes: what `largest` shall be, by the kind of edge."""
BELOW_FAST = 0.97
CARDS_OFF = 0.03

Outcome = Literal["pass", "FAIL", "missing"]


@dataclass(frozen=True)
class Verdict:
    """Whether a criterion holds in a case."""

    criterion: str
    case: str
    outcome: Outcome
    detail: str = ""


class Findings:
    """A state, as those who judge it want to read it."""

    def __init__(self, state: State) -> None:
        self.state = state

    def answer(self, case: Case) -> dict[str, Any] | None:
        told = self.state.get(case.name, "fit")
        return told["answer"] if told else None

    def batches(self, case: Case) -> tuple[int, int] | None:
        """`largest` and `fast` of fit."""
        answer = self.answer(case)
        if not answer or not answer.get("largest"):
            return None
        largest = int(answer["largest"]["size"])
        return largest, int((answer.get("fast") or answer["largest"])["size"])

    def points(self, case: Case) -> dict[int, Point]:
        return points_of(self.state.points(case.name))

    def scan_wants(self, case: Case) -> list[int]:
        batches = self.batches(case)
        if batches is None:
            return []
        return wanted(*batches, self.points(case), thorough=case.group != "sizes")

    def truth(self, case: Case) -> Truth | None:
        """Only of a scan that is complete."""
        return truth(self.points(case)) if self.is_done(case, "scan") else None

    def rival(self, case: Case, rival: str) -> int | None:
        told = self.state.get(case.name, rival)
        return int(told["batch"]) if told else None

    def rates_want(self, case: Case) -> list[int]:
        """The rivals' answers that were not trained yet."""
        found = (self.rival(case, rival) for rival in RIVALS)
        points = self.points(case)
        return list(dict.fromkeys(batch for batch in found if batch and batch not in points))

    def is_done(self, case: Case, item: str) -> bool:
        """A batch that was tried counts only while it still is what fit answers."""
        batches = self.batches(case)
        if item == "scan":
            return batches is not None and not self.scan_wants(case)
        if item == "rates":
            known = all(self.rival(case, rival) is not None for rival in RIVALS)
            return known and not self.rates_want(case)
        told = self.state.get(case.name, item)
        if item in ("three", "long"):
            asked = batches and batches[item == "long"]
            return told is not None and told["batch"] == asked
        return told is not None

    def missing(self, cases: Sequence[Case]) -> list[str]:
        return [f"{c.name}: {i}" for c in cases for i in c.items if not self.is_done(c, i)]


def verdicts(findings: Findings, cases: Sequence[Case]) -> Iterator[Verdict]:
    """Criterion by criterion, as issue 7 counts them."""
    for case in cases:
        yield _largest(findings, case)
    for case in cases:
        yield _fast(findings, case)
    for case in cases:
        if "lightning_binsearch" in case.items:
            yield _quick(findings, case)
    for case in cases:
        if "long" in case.items:
            yield _lasts(findings, case)
    for case in cases:
        if "cards" in case.items:
            yield from _other_cards(findings, case, cases)


def _judged(criterion: str, case: Case, good: bool, detail: str) -> Verdict:
    return Verdict(criterion, case.name, "pass" if good else "FAIL", detail)


def _largest(findings: Findings, case: Case) -> Verdict:
    name = "1 largest"
    batches, true = findings.batches(case), findings.truth(case)
    if batches is None or true is None or not findings.is_done(case, "three"):
        return Verdict(name, case.name, "missing")
    told = findings.state.get(case.name, "three") or {}
    passed = sum(bool(each["passed"]) for each in told["tries"])
    share = batches[0] / true.largest
    good = passed == 3 and share >= (RAGGED if true.ragged else CLEAN)
    edge = "ragged" if true.ragged else "clean"
    detail = f"{batches[0]} of {true.largest} ({share:.1%}, {edge}), {passed}/3 passed"
    if not found_edge(batches[0], findings.points(case), case.group != "sizes"):
        good, detail = False, f"{detail}; larger ones were not tried"
    limit = ((findings.answer(case) or {}).get("room") or {}).get("limit", case.cap)
    if limit != case.cap:
        detail += f"; fit had {limit / GIB:.2f} GiB, the scan {case.gib}"
    return _judged(name, case, good, detail)


def _fast(findings: Findings, case: Case) -> Verdict:
    name = "1 fast"
    batches, true = findings.batches(case), findings.truth(case)
    point = findings.points(case).get(batches[1]) if batches else None
    if batches is None or true is None or point is None:
        return Verdict(name, case.name, "missing")
    speed = point.rate / true.best_rate if true.best_rate else 0.0
    good = point.smooth and speed >= FULL_SPEED and batches[1] >= BELOW_FAST * true.fast
    how = f"{point.retries} retries" if point.passed else "does not even pass"
    detail = f"{batches[1]} of {true.fast}, {how}, {speed:.1%} of the best rate"
    return _judged(name, case, good, detail)


def _quick(findings: Findings, case: Case) -> Verdict:
    name = "2 seconds"
    ours = findings.state.get(case.name, "fit")
    theirs = findings.state.get(case.name, "lightning_binsearch")
    if ours is None or theirs is None or "beside" in ours or "beside" in theirs:
        return Verdict(name, case.name, "missing")
    detail = f"{ours['seconds']:.1f} s, binsearch {theirs['seconds']:.1f} s"
    return _judged(name, case, ours["seconds"] <= theirs["seconds"], detail)


def _lasts(findings: Findings, case: Case) -> Verdict:
    name = "3 lasts"
    if not findings.is_done(case, "long"):
        return Verdict(name, case.name, "missing")
    told = (findings.state.get(case.name, "long") or {})["tries"][0]
    good = told["passed"] and not told["retries"]
    how = f"{told['retries']} retries" if told["passed"] else f"failed in {told['where']}"
    return _judged(name, case, good, f"100 steps at {told['batch']}: {how}")


def _other_cards(findings: Findings, case: Case, cases: Sequence[Case]) -> Iterator[Verdict]:
    predicted = cards_of(findings, case)
    for gib in CARDS:
        criterion = f"4 card of {gib} GiB"
        scanned = next((c for c in cases if c.model == case.model and c.gib == gib), None)
        true = findings.truth(scanned) if scanned else None
        card = predicted.get(gib)
        if card is None or true is None:
            yield Verdict(criterion, case.name, "missing")
            continue
        off = card["largest"] / true.largest - 1
        detail = f"{card['largest']} predicted, {true.largest} true ({off:+.1%})"
        if card["limit"] != card["size"]:
            detail += f"; predicted for {card['limit'] / GIB:.2f} GiB"
        yield _judged(criterion, case, abs(off) <= CARDS_OFF, detail)


def cards_of(findings: Findings, case: Case) -> dict[int, dict[str, Any]]:
    """What was predicted for other cards, by their GiB."""
    told = findings.state.get(case.name, "cards")
    return {round(card["size"] / GIB): card for card in told["cards"]} if told else {}
