"""What is said of a verdict: in words, in a terminal, on the page and for programs."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from rich.cells import cell_len
from rich.console import Console

from stepscope.records import Advice, Ending, Evidence, Finding, Outcome, Verdict
from stepscope.report.explain import explained, quantity_text, verdict_view
from stepscope.report.explainhtml import finding_card
from stepscope.report.explainjson import FINDING_KEYS, KEYS, explained_dict, verdict_dict
from stepscope.report.explaintext import print_after_run, print_after_trial, print_explained
from stepscope.runs.reader import Run, open_run
from synthetic import write_empty_run
from synthetic_verdicts import BAD, COMPUTE, HEALTHY, LEAK, WEAK, WORKERS, verdicts

FINE = Ending(Outcome.OK, "the command ended by itself with exit code 0")
FOLDER = Path("runs", "20260102-100305_train_4f2a9c")
VOID = {"br", "hr", "img", "input", "link", "meta"}


def told(verdict: Verdict, *, in_full: bool = False, colour: bool = False) -> str:
    """What `stepscope explain` prints."""
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=colour)
    print_explained(console, "train", FINE, verdict_view(verdict), in_full)
    return out.getvalue()


def after_run(verdict: Verdict) -> list[str]:
    out = io.StringIO()
    print_after_run(Console(file=out, width=80), verdict_view(verdict), FOLDER)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def after_trial(verdict: Verdict) -> list[str]:
    out = io.StringIO()
    print_after_trial(Console(file=out, width=80), verdict_view(verdict))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def in_order(text: str, *parts: str) -> bool:
    """Whether a text has all parts, each after the one before, however its lines are broken."""
    return bool(re.search(".*".join(map(re.escape, parts)), " ".join(text.split()), re.DOTALL))


def test_all_that_is_told_of_a_verdict_and_in_which_order() -> None:
    assert in_order(
        told(BAD),
        "train ok the command ended by itself with exit code 0",
        WORKERS.says,
        "Fixing this gives at most 2.6×",
        "High confidence: the loader, the stack samples",
        "Evidence Value Threshold Measured by",
        "waited for the next batch 62 % above 10 % (input_wait) loader",
        "a step without the wait 70.0 µs loader",
        "What to do",
        "1. num_workers=3",
        "train.py:41 loader = DataLoader(data, batch_size=64, num_workers=1, shuffle=True)",
        "three workers prepare a batch",
        "2. Decode the images once",
        "Next: With the wait gone",
        "Also found",
        "copies from memory that is not pinned medium confidence, at most 1.09×",
        "pin_memory=True (train.py:41)",
        "host memory grows high confidence losses.append",
        "Judged: steps 21 to 412 of 420",
    )


def test_other_findings_have_their_evidence_only_when_asked_for() -> None:
    assert "pinned_copy" not in told(BAD)
    assert in_order(told(BAD, in_full=True), "Next:", "Also: copies from", "pinned_copy", "Judged:")


def test_the_sentence_stands_out_in_a_terminal_and_plain_text_is_plain() -> None:
    assert "\x1b[1;33mTraining waits" in told(BAD, colour=True)
    assert "\x1b[1;32mThe GPU is busy" in told(HEALTHY, colour=True)
    assert "\x1b" not in told(BAD)


def test_a_run_ends_with_the_finding_two_advices_and_where_there_is_more() -> None:
    lines = after_run(BAD)
    assert lines[3:6] == [
        "Fixing this gives at most 2.6× (high confidence)",
        "1. num_workers=3  (train.py:41)",
        "2. Decode the images once and keep them as tensors  (data.py:17)",
    ]
    assert not any("persistent_workers" in line for line in lines)
    assert in_order("\n".join(lines), "Next: With the wait gone")
    assert lines[-1] == f"More: stepscope explain {FOLDER}"


def test_a_trial_ends_with_the_finding_and_one_advice() -> None:
    assert after_trial(BAD)[-1] == "1. num_workers=3  (train.py:41)"


@pytest.mark.parametrize(
    ("ceiling", "gain"),
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
def test_nothing_is_claimed_that_is_not_known(ceiling: float | None, gain: str) -> None:
    view = verdict_view(replace(BAD, findings=(replace(WORKERS, ceiling=ceiling),)))
    assert view.first.gain == gain
    assert ("at most" in view.first.brief) == gain.startswith("Fixing")


def test_what_is_healthy_needs_no_fixing() -> None:
    view = verdict_view(HEALTHY)
    assert (view.first.gain, view.first.tone) == ("", "good")
    assert verdict_view(replace(BAD, findings=(LEAK,))).first.tone == "warning"
    short = replace(WORKERS, cause="short")
    assert verdict_view(replace(BAD, findings=(short,))).first.tone == "neutral"


def test_a_weak_verdict_says_so_and_what_to_do() -> None:
    assert in_order(told(WEAK), "Judged:", "Without steps, this", 'stepscope.mark("step")')
    assert 'stepscope.mark("step")' not in told(BAD)


def test_a_number_says_on_which_side_of_its_threshold_it_is() -> None:
    def threshold(value: float, limit: float | None, name: str | None = "waiting") -> str:
        evidence = (Evidence("it", value, "share", name, limit),)
        finding = replace(COMPUTE, evidence=evidence)
        return verdict_view(replace(HEALTHY, findings=(finding,))).first.evidence[0].threshold

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
    plain = explained_dict(run, BAD)
    assert list(plain) == [key for key, _ in KEYS]
    assert list(plain["findings"][0]) == [key for key, _ in FINDING_KEYS]
    assert (plain["run"], plain["outcome"]) == (run.name, "ok")
    assert (plain["cause"], plain["ceiling"], plain["weak"]) == ("input.workers", 2.63, False)
    assert plain["window"] == {"begin_s": 14.2, "end_s": 88.0}
    assert plain["findings"][0]["advice"][0]["where"] == "train.py:41"


def test_json_knows_the_numbers_of_numpy() -> None:
    found = replace(COMPUTE, ceiling=np.float64(1.5), healthy=np.bool_(True))
    found = replace(found, evidence=(Evidence("it", np.int64(3), "count", None, np.float32(0.5)),))
    plain = json.loads(json.dumps(verdict_dict(replace(HEALTHY, findings=(found,)))))
    assert (plain["ceiling"], plain["healthy"]) == (1.5, True)
    assert (plain["findings"][0]["evidence"][0]["value"]) == 3


def test_an_error_of_the_analysis_becomes_a_note(tmp_path: Path) -> None:
    class Broken(Run):
        def explained(self) -> Verdict:
            raise ZeroDivisionError("division by zero")

    sound = open_run(write_empty_run(tmp_path / "run").folder)
    view, note = explained(Broken(sound.path, sound.facts))
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


def test_the_card_has_all_of_the_verdict() -> None:
    card = finding_card(verdict_view(BAD))
    page = Page(card)
    assert card.startswith('<section class="card finding warning"')
    assert in_order(
        page.text,
        WORKERS.says,
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
    assert 'finding good"' in finding_card(verdict_view(HEALTHY))
    assert "Without steps, this" in finding_card(verdict_view(WEAK))


ALLOWED = {
    "section", "h2", "h3", "p", "span", "div", "table", "thead", "tbody", "tr", "th", "td",
    "ol", "li", "code", "strong", "details", "summary",
}  # fmt: skip


@settings(max_examples=100)
@given(verdicts)
def test_any_verdict_can_be_told(verdict: Verdict) -> None:
    for in_full in (False, True):
        text = told(verdict, in_full=in_full)
        assert all(cell_len(line) <= 80 for line in text.split("\n"))
        assert all(character.isprintable() or character == "\n" for character in text)
    assert all(cell_len(line) <= 80 for line in after_run(verdict) + after_trial(verdict))
    page = Page(finding_card(verdict_view(verdict)))
    assert not page.open
    assert set(page.tags) <= ALLOWED
    plain = verdict_dict(verdict)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", 'a"><img src=x>', "</p>&amp;"])
def test_texts_of_users_are_text_on_the_page_and_in_the_terminal(nasty: str) -> None:
    steering = f"{nasty}\x1b[2J[red]"
    advice = (Advice(steering, steering, steering, steering),)
    evidence = (Evidence(steering, 1.0, "share", steering, 0.5, steering),)
    finding = Finding(steering, steering, steering, "low", steering, 1.5, False, evidence, advice)
    verdict = Verdict((finding, finding), steering, steering, 0.0, 1.0)
    page = Page(finding_card(verdict_view(verdict)))
    assert set(page.tags) <= ALLOWED
    in_one = 9  # says, because, three of the evidence, four of the advice
    assert page.text.count(nasty) == 2 * in_one + 4  # two titles, next, basis
    assert "\x1b" not in told(verdict, in_full=True) + "".join(after_run(verdict))
    assert "[red]" in told(verdict)
    assert asdict(finding)["says"] == verdict_dict(verdict)["says"]
