"""What is said of a diagnosis: in words, in a terminal, on the page and for programs."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from rich.cells import cell_len
from rich.console import Console

from stepscope.analysis.run.data import RunData
from stepscope.records import Diagnosis, Ending, Evidence, Finding, Outcome
from stepscope.report.bottleneck.document import (
    closing_section,
    diagnosis_section,
    explained_document,
)
from stepscope.report.bottleneck.json import FINDING_KEYS, KEYS, diagnosis_dict, explained_dict
from stepscope.report.bottleneck.view import (
    DiagnosisView,
    EvidenceRow,
    FindingView,
    RecommendationView,
    diagnosis_view,
    explained,
    quantity_text,
)
from stepscope.report.kit import html
from stepscope.report.kit.document import Document
from stepscope.report.kit.terminal import draw, draw_blocks
from stepscope.runs.reader import open_run
from synthetic import write_empty_run
from synthetic_diagnoses import (
    BAD,
    COMPUTE,
    HEALTHY,
    LEAK,
    WEAK,
    WORKERS,
    WORKERS_SUMMARY,
    views,
)

FINE = Ending(Outcome.OK, "the command ended by itself with exit code 0")
FOLDER = Path("runs", "20260102-100305_train_4f2a9c")
VOID = {"br", "hr", "img", "input", "link", "meta"}


def view_of(what: Diagnosis | DiagnosisView) -> DiagnosisView:
    return diagnosis_view(what) if isinstance(what, Diagnosis) else what


def told(what: Diagnosis | DiagnosisView, *, in_full: bool = False, colour: bool = False) -> str:
    """What `stepscope explain` prints."""
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=colour)
    draw(console, explained_document("train", FINE, view_of(what), in_full))
    return out.getvalue()


def after_run(what: Diagnosis | DiagnosisView) -> list[str]:
    out = io.StringIO()
    draw_blocks(Console(file=out, width=80), [closing_section(view_of(what), FOLDER)])
    return [line.rstrip() for line in out.getvalue().splitlines()]


def after_trial(what: Diagnosis | DiagnosisView) -> list[str]:
    out = io.StringIO()
    draw_blocks(Console(file=out, width=80), [closing_section(view_of(what))])
    return [line.rstrip() for line in out.getvalue().splitlines()]


def page_of(what: Diagnosis | DiagnosisView) -> str:
    """The page with the diagnosis alone, from its first block on."""
    page = html.render(Document("train", "ok", "good", (diagnosis_section(view_of(what)),)))
    return page[page.index("<section") : page.index("<footer>")].removesuffix("</main>")


def in_order(text: str, *parts: str) -> bool:
    """Whether a text has all parts, each after the one before, however its lines are broken."""
    return bool(re.search(".*".join(map(re.escape, parts)), " ".join(text.split()), re.DOTALL))


def test_all_that_is_told_of_a_diagnosis_and_in_which_order() -> None:
    assert in_order(
        told(BAD),
        "train ok the command ended by itself with exit code 0",
        WORKERS_SUMMARY,
        "Fixing this gives at most 2.6×",
        "High confidence: each batch's wait was measured, 391 steps",
        "Evidence Value Threshold Measured by",
        "waited for the next batch 62 % above 10 % (input_wait) loader",
        "a step takes besides 70.0 ms steps",
        "What to do",
        "1. num_workers=3",
        "train.py:41 loader = DataLoader(data, batch_size=64, num_workers=1, shuffle=True)",
        "a batch takes 183 ms to prepare and is needed every 70 ms",
        "2. a collate_fn that allocates once",
        "Next: once that is fixed, the GPU computes: that is how it should be.",
        "Also found",
        "copying batches to the GPU medium confidence, at most 1.09×",
        "pin_memory=True (train.py:41)",
        "host memory grows without end high confidence look for a list",
        "Judged: 391 steps in 73.8 s, after 20 of warm-up",
    )


def test_other_findings_have_their_evidence_only_when_asked_for() -> None:
    assert "copy_rate" not in told(BAD)
    assert in_order(
        told(BAD, in_full=True), "Next:", "Also: copying batches", "copy_rate", "Judged:"
    )


def test_the_sentence_stands_out_in_a_terminal_and_plain_text_is_plain() -> None:
    assert "\x1b[1;33mTraining waits" in told(BAD, colour=True)
    assert "\x1b[1;32mThe GPU is the limit" in told(HEALTHY, colour=True)
    assert "\x1b" not in told(BAD)


def test_a_run_ends_with_the_finding_two_advices_and_where_there_is_more() -> None:
    lines = after_run(BAD)
    assert lines[3:6] == [
        "Fixing this gives at most 2.6× (high confidence)",
        "1. num_workers=3  (train.py:41)",
        "2. a collate_fn that allocates once and copies (torch.stack(samples, out=…),",
    ]
    assert not any("persistent_workers" in line for line in lines)
    assert in_order("\n".join(lines), "Next: once that is fixed")
    assert lines[-1] == f"More  stepscope explain {FOLDER}"


def test_a_trial_ends_with_the_finding_and_one_advice() -> None:
    assert after_trial(BAD)[-1] == "1. num_workers=3  (train.py:41)"


@pytest.mark.parametrize(
    ("bound", "gain"),
    [
        (1.84, "Fixing this gives at most 1.8×"),
        (1.09, "Fixing this gives at most 1.09×"),
        (23.4, "Fixing this gives at most 23×"),
        (1.05, "No speed to gain, but better fixed"),
        (None, ""),
        (math.nan, ""),
        (math.inf, ""),
    ],
)
def test_nothing_is_claimed_that_is_not_known(bound: float | None, gain: str) -> None:
    view = diagnosis_view(replace(BAD, findings=(replace(WORKERS, speedup_bound=bound),)))
    assert view.first.gain == gain
    assert ("at most" in view.first.brief) == gain.startswith("Fixing")


def test_what_is_healthy_needs_no_fixing() -> None:
    view = diagnosis_view(HEALTHY)
    assert (view.first.gain, view.first.tone) == ("", "good")
    assert diagnosis_view(replace(BAD, findings=(LEAK,))).first.tone == "warning"
    short = Finding("short", "high", None, {"steps": 3, "seconds": 1.0})
    assert diagnosis_view(replace(BAD, findings=(short,))).first.tone == "neutral"


def test_a_weak_diagnosis_says_so_and_what_to_do() -> None:
    assert in_order(told(WEAK), "Judged:", "Without steps, this", 'stepscope.mark("step")')
    assert 'stepscope.mark("step")' not in told(BAD)


def test_a_number_says_on_which_side_of_its_threshold_it_is() -> None:
    def threshold(value: float, limit: float | None, name: str | None = "waiting") -> str:
        return EvidenceRow("it", value, "share", name, limit, "").cells[2]

    assert threshold(0.2, 0.1) == "above 10 % (waiting)"
    assert threshold(0.02, 0.1) == "below 10 % (waiting)"
    assert threshold(0.1, 0.1) == "at 10 % (waiting)"
    assert threshold(0.2, 0.1, None) == "above 10 %"
    assert threshold(0.2, None) == "waiting"
    assert threshold(math.nan, 0.1) == "waiting"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.000_0123, "s", "12.3 µs"),
        (0.0123, "s", "12.3 ms"),
        (0.9996, "s", "1.0 s"),
        (12000, "s", "3 h 20 min"),
        (0, "s", "0 s"),
        (1.5, "cores", "1.50 cores"),
        (1.83, "times", "1.83×"),
        (2.5e9, "bytes/s", "2.50 GB/s"),
        (700, "W", "700 W"),
        (14, "count", "14"),
        (0.052, "count", "0.052"),
        (0.12, "seconds/s", "12 %"),
        (math.nan, "count", "–"),
    ],
)
def test_values_by_their_unit(value: float, unit: str, text: str) -> None:
    assert quantity_text(value, unit) == text


def test_keys_of_the_json_are_those_that_are_documented(tmp_path: Path) -> None:
    run = open_run(write_empty_run(tmp_path / "run").folder)
    plain = explained_dict(run, diagnosis_view(BAD))
    assert list(plain) == [key for key, _ in KEYS]
    assert list(plain["findings"][0]) == [key for key, _, _ in FINDING_KEYS]
    assert (plain["run"], plain["outcome"]) == (run.name, "ok")
    assert (plain["cause"], plain["ceiling"], plain["weak"]) == ("input.workers", 2.63, False)
    assert plain["window"] == {"begin_s": 14.2, "end_s": 88.0}
    assert plain["findings"][0]["advice"][0]["where"] == "train.py:41"


def test_json_knows_the_numbers_of_numpy() -> None:
    evidence = (Evidence("in_use", np.int64(3), "count", None, np.float32(0.5)),)
    found = replace(COMPUTE, speedup_bound=np.float64(1.5), evidence=evidence)
    view = diagnosis_view(replace(HEALTHY, findings=(found,)))
    plain = json.loads(json.dumps(diagnosis_dict(view)))
    assert (plain["ceiling"], plain["healthy"]) == (1.5, True)
    assert (plain["findings"][0]["evidence"][0]["value"]) == 3


def test_an_error_of_the_analysis_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: RunData) -> Diagnosis:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("stepscope.report.bottleneck.view.explain", broken)
    view, note = explained(RunData({}, (), 0, 1))
    assert view is None
    assert "ZeroDivisionError: division by zero" in note


class Page(HTMLParser):
    """The text of a piece of HTML, and whether every element ends where it should."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.open, self.tags = "", [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_card_has_all_of_the_diagnosis() -> None:
    card = page_of(BAD)
    page = Page(card)
    assert card.startswith('<section class="card finding warning"')
    assert in_order(
        page.text,
        WORKERS_SUMMARY,
        "Fixing this gives at most 2.6×",
        "High confidence",
        "above 10 % (input_wait)",
        "What to do",
        "num_workers=3",
        "train.py:41",
        "Next:",
        "2 other findings",
        "pin_memory=True",
        "Judged:",
    )
    assert 'finding good"' in page_of(HEALTHY)
    assert "Without steps, this" in page_of(WEAK)


ALLOWED = {
    "section",
    "h2",
    "h3",
    "p",
    "span",
    "div",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "ol",
    "li",
    "code",
    "strong",
    "details",
    "summary",
}


@settings(max_examples=100)
@given(views)
def test_any_diagnosis_can_be_drawn(view: DiagnosisView) -> None:
    for in_full in (False, True):
        text = told(view, in_full=in_full)
        assert all(cell_len(line) <= 80 for line in text.split("\n"))
        assert all(character.isprintable() or character == "\n" for character in text)
    assert all(cell_len(line) <= 80 for line in after_run(view) + after_trial(view))
    page = Page(page_of(view))
    assert not page.open
    assert set(page.tags) <= ALLOWED
    plain = diagnosis_dict(view)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", 'a"><img src=x>', "</p>&amp;"])
def test_texts_of_users_are_text_on_the_page_and_in_the_terminal(nasty: str) -> None:
    steering = f"{nasty}\x1b[2J[red]"
    finding = FindingView(
        cause=steering,
        title=steering,
        summary=steering,
        tone="warning",
        confidence="low",
        reason=steering,
        speedup_bound=1.5,
        evidence=(EvidenceRow(steering, 1.0, "share", steering, 0.5, steering),),
        recommendations=(RecommendationView(steering, steering, steering, steering),),
    )
    view = DiagnosisView((finding, finding), steering, steering, 0.0, 1.0, weak=False)
    page = Page(page_of(view))
    assert set(page.tags) <= ALLOWED
    in_one = 9  # says, because, three of the evidence, four of the advice
    assert page.text.count(nasty) == 2 * in_one + 4  # two titles, next, basis
    assert "\x1b" not in told(view, in_full=True) + "".join(after_run(view))
    assert "[red]" in told(view)
    assert diagnosis_dict(view)["says"] == steering
