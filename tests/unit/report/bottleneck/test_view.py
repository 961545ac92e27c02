"""A diagnosis as texts: in a terminal, on the report page and as JSON."""

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
from stepscope.records import Diagnosis, Evidence, ExitStatus, Finding, Outcome
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

FINE = ExitStatus(Outcome.OK, "the command ended by itself with exit code 0")
FOLDER = Path("runs", "20260102-100305_train_4f2a9c")
VOID = {"br", "hr", "img", "input", "link", "meta"}


def view_of(diagnosis: Diagnosis | DiagnosisView) -> DiagnosisView:
    return diagnosis_view(diagnosis) if isinstance(diagnosis, Diagnosis) else diagnosis


def printed(
    diagnosis: Diagnosis | DiagnosisView, *, in_full: bool = False, color: bool = False
) -> str:
    """Return the output of `stepscope explain`."""
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=color)
    draw(console, explained_document("train", FINE, view_of(diagnosis), in_full))
    return out.getvalue()


def after_run(diagnosis: Diagnosis | DiagnosisView) -> list[str]:
    out = io.StringIO()
    draw_blocks(Console(file=out, width=80), [closing_section(view_of(diagnosis), FOLDER)])
    return [line.rstrip() for line in out.getvalue().splitlines()]


def after_trial(diagnosis: Diagnosis | DiagnosisView) -> list[str]:
    out = io.StringIO()
    draw_blocks(Console(file=out, width=80), [closing_section(view_of(diagnosis))])
    return [line.rstrip() for line in out.getvalue().splitlines()]


def page_of(diagnosis: Diagnosis | DiagnosisView) -> str:
    """Return the HTML of the diagnosis on the report page."""
    page = html.render(Document("train", "ok", "good", (diagnosis_section(view_of(diagnosis)),)))
    return page[page.index("<section") : page.index("<footer>")].removesuffix("</main>")


def in_order(text: str, *parts: str) -> bool:
    """Whether a text has all parts in this order, regardless of line breaks."""
    return bool(re.search(".*".join(map(re.escape, parts)), " ".join(text.split()), re.DOTALL))


def test_explain_prints_all_of_a_diagnosis_in_order() -> None:
    assert in_order(
        printed(BAD),
        "train ok the command ended by itself with exit code 0",
        "Bottleneck: Too few loader workers",
        WORKERS_SUMMARY,
        "Potential speed-up: at most 2.6×",
        "Confidence: high (the wait for each batch was measured over 391 steps)",
        "Evidence Value Threshold Source",
        "Time waiting for data 62% above 10% (data_wait) loader",
        "Step time without data wait 70.0 ms steps",
        "Recommendations",
        "1. Set num_workers=3",
        "train.py:41 loader = DataLoader(data, batch_size=64, num_workers=1, shuffle=True)",
        "Preparing a batch takes 183 ms, and training needs one every 70 ms.",
        "2. Use a collate_fn that allocates once",
        "Next bottleneck: GPU compute-bound (healthy)",
        "Other findings (details: --all)",
        "Host-to-device copies: at most 1.09×, medium confidence",
        "Set pin_memory=True (train.py:41)",
        "Host memory leak: high confidence Check the training loop for a list",
        "Based on: 391 steps in 73.8 s, after 20 warm-up steps",
    )


def test_evidence_of_other_findings_is_optional() -> None:
    assert "copy_rate" not in printed(BAD)
    assert in_order(
        printed(BAD, in_full=True),
        "Next bottleneck:",
        "Other finding: Host-to-device copies",
        "copy_rate",
        "Based on:",
    )


def test_summary_is_colored_only_in_a_terminal() -> None:
    assert "\x1b[1;33mTraining waits" in printed(BAD, color=True)
    assert "\x1b[1;32mThe GPU is the limit" in printed(HEALTHY, color=True)
    assert "\x1b" not in printed(BAD)


def test_run_ends_with_the_finding_two_recommendations_and_a_command() -> None:
    lines = after_run(BAD)
    assert lines[3:6] == [
        "Potential speed-up: at most 2.6×. Confidence: high",
        "1. Set num_workers=3  (train.py:41)",
        "2. Use a collate_fn that allocates once and copies (torch.stack(samples, out=…),",
    ]
    assert not any("persistent_workers" in line for line in lines)
    assert in_order("\n".join(lines), "Next bottleneck: GPU compute-bound")
    assert lines[-1] == f"Details  stepscope explain {FOLDER}"


def test_trial_ends_with_the_finding_and_one_recommendation() -> None:
    assert after_trial(BAD)[-1] == "1. Set num_workers=3  (train.py:41)"


@pytest.mark.parametrize(
    ("bound", "gain"),
    [
        (1.84, "Potential speed-up: at most 1.8×"),
        (1.09, "Potential speed-up: at most 1.09×"),
        (23.4, "Potential speed-up: at most 23×"),
        (1.02, "Potential speed-up: at most 1.05×"),
        (None, ""),
        (math.nan, ""),
        (math.inf, ""),
    ],
)
def test_gain_is_shown_only_if_known(bound: float | None, gain: str) -> None:
    view = diagnosis_view(replace(BAD, findings=(replace(WORKERS, speedup_bound=bound),)))
    assert view.first.gain_text == gain
    assert view.first.gain == gain.removeprefix("Potential speed-up: ")
    assert ("at most" in view.first.short_text) == (bound in (1.84, 1.09, 23.4))


def test_leak_prevents_a_failure_and_is_not_called_a_bottleneck() -> None:
    first = diagnosis_view(replace(BAD, findings=(LEAK,))).first
    assert (first.heading, first.tone) == ("Host memory leak", "warning")
    prevents = "Fixing this does not make training faster, but prevents a failure"
    assert (first.gain, first.gain_text, first.badge) == (prevents, prevents, "May crash the run")


def test_healthy_finding_has_no_gain() -> None:
    view = diagnosis_view(HEALTHY)
    assert (view.first.gain_text, view.first.tone) == ("", "good")
    short = Finding("too_short", "high", None, {"steps": 3, "seconds": 1.0})
    first = diagnosis_view(replace(BAD, findings=(short,))).first
    assert (first.heading, first.tone) == ("Run too short", "neutral")


def test_diagnosis_without_steps_has_a_warning() -> None:
    assert in_order(printed(WEAK), "Based on:", "No steps were observed", 'stepscope.mark("step")')
    assert 'stepscope.mark("step")' not in printed(BAD)


def test_value_is_compared_with_its_threshold() -> None:
    def threshold(value: float, limit: float | None, name: str | None = "waiting") -> str:
        return EvidenceRow("Wait", value, "share", name, limit, "").cells[2]

    assert threshold(0.2, 0.1) == "above 10% (waiting)"
    assert threshold(0.02, 0.1) == "below 10% (waiting)"
    assert threshold(0.1, 0.1) == "at 10% (waiting)"
    assert threshold(0.2, 0.1, None) == "above 10%"
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
        (2.5 * (1 << 30), "bytes/s", "2.50 GiB/s"),
        (700, "W", "700 W"),
        (14, "count", "14"),
        (0.052, "count", "0.052"),
        (0.12, "seconds/s", "12%"),
        (math.nan, "count", "–"),
    ],
)
def test_values_by_their_unit(value: float, unit: str, text: str) -> None:
    assert quantity_text(value, unit) == text


def test_json_keys_are_documented(tmp_path: Path) -> None:
    run = open_run(write_empty_run(tmp_path / "run").folder)
    plain = explained_dict(run, diagnosis_view(BAD))
    assert list(plain) == [key for key, _ in KEYS]
    assert list(plain["findings"][0]) == [key for key, _, _ in FINDING_KEYS]
    assert (plain["run"], plain["outcome"]) == (run.name, "ok")
    assert (plain["cause"], plain["speedup_bound"], plain["without_steps"]) == (
        "input.workers",
        2.63,
        False,
    )
    assert plain["window"] == {"begin_s": 14.2, "end_s": 88.0}
    recommendation = plain["findings"][0]["recommendations"][0]
    assert list(recommendation) == ["change", "reason", "location", "code"]
    assert recommendation["location"] == "train.py:41"
    evidence = plain["findings"][0]["evidence"][0]
    assert list(evidence) == ["name", "value", "unit", "threshold", "limit", "source"]


def test_numpy_numbers_become_json() -> None:
    evidence = (Evidence("in_use", np.int64(3), "count", None, np.float32(0.5)),)
    found = replace(COMPUTE, speedup_bound=np.float64(1.5), evidence=evidence)
    view = diagnosis_view(replace(HEALTHY, findings=(found,)))
    plain = json.loads(json.dumps(diagnosis_dict(view)))
    assert (plain["speedup_bound"], plain["healthy"]) == (1.5, True)
    assert (plain["findings"][0]["evidence"][0]["value"]) == 3


def test_error_of_the_analysis_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: RunData) -> Diagnosis:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("stepscope.report.bottleneck.view.explain", broken)
    view, note = explained(RunData({}, (), 0, 1))
    assert view is None
    assert "ZeroDivisionError: division by zero" in note


class Page(HTMLParser):
    """Collects the text of HTML, and checks that every element is closed."""

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


def test_page_has_all_of_the_diagnosis() -> None:
    card = page_of(BAD)
    page = Page(card)
    assert card.startswith('<section class="card finding warning"')
    assert in_order(
        page.text,
        WORKERS_SUMMARY,
        "Speed-up: at most 2.6×",
        "Confidence: high",
        "above 10% (data_wait)",
        "Recommendations",
        "Set num_workers=3",
        "train.py:41",
        "Next bottleneck:",
        "2 other findings: Host-to-device copies, Host memory leak",
        "pin_memory=True",
        "Based on:",
    )
    assert 'finding good"' in page_of(HEALTHY)
    assert "No steps were observed" in page_of(WEAK)


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
        text = printed(view, in_full=in_full)
        assert all(cell_len(line) <= 80 for line in text.split("\n"))
        assert all(character.isprintable() or character == "\n" for character in text)
    assert all(cell_len(line) <= 80 for line in after_run(view) + after_trial(view))
    page = Page(page_of(view))
    assert not page.open
    assert set(page.tags) <= ALLOWED
    plain = diagnosis_dict(view)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@pytest.mark.parametrize("markup", ["<script>alert(1)</script>", 'a"><img src=x>', "</p>&amp;"])
def test_texts_are_escaped(markup: str) -> None:
    text = f"{markup}\x1b[2J[red]"
    finding = FindingView(
        cause=text,
        title=text,
        summary=text,
        tone="warning",
        confidence="low",
        reason=text,
        speedup_bound=1.5,
        evidence=(EvidenceRow(text, 1.0, "share", text, 0.5, text),),
        recommendations=(RecommendationView(text, text, text, text),),
    )
    view = DiagnosisView((finding, finding), text, text, 0.0, 1.0, without_steps=False)
    page = Page(page_of(view))
    assert set(page.tags) <= ALLOWED
    per_finding = 9  # summary, reason, three of the evidence, four of the recommendation
    assert page.text.count(markup) == 2 * per_finding + 4  # two titles, next, basis
    assert "\x1b" not in printed(view, in_full=True) + "".join(after_run(view))
    assert "[red]" in printed(view)
    assert diagnosis_dict(view)["summary"] == text
