"""From a run folder to what is shown of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.report.bottleneck.view import RecommendationView, diagnosis_view
from stepscope.report.kit.html import render
from stepscope.report.run.derive import derive
from stepscope.report.run.document import page_of
from stepscope.report.run.json import summary_dict
from stepscope.report.run.view import flattened, overhead_text, run_view
from stepscope.runs.reader import open_run
from synthetic import Plan, write_cut_off_run, write_empty_run, write_run
from synthetic_diagnoses import BAD

NASTY = '</script><script>alert(1)</script> & "x" \u2028'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run").folder


def test_all_files_are_written_and_can_be_rebuilt(folder: Path) -> None:
    run = open_run(folder)
    view = derive(run)
    summary = json.loads(run.paths.summary_json.read_text())
    assert summary == summary_dict(view)
    findings = json.loads((run.paths.derived / "findings.json").read_text())
    assert findings == {**findings, **summary["explained"]}
    assert findings["outcome"] == "ok"
    first = run.paths.report_html.read_text()
    shutil.rmtree(run.paths.derived)
    derive(open_run(folder))
    assert run.paths.report_html.read_text() == first
    assert sorted(path.name for path in run.paths.derived.iterdir()) == [
        "findings.json",
        "report.html",
        "summary.json",
    ]


def test_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    paths = write_empty_run(tmp_path / "run")
    paths.derived.write_text("in the way")
    with pytest.raises(OSError):
        derive(open_run(paths.folder))


def test_view_has_the_clock_the_epochs_and_the_phases_of_the_run(folder: Path) -> None:
    view = run_view(open_run(folder))
    assert view.charts.seconds == 60
    assert [index for _, index in view.charts.epochs] == [0, 1, 2, 3]
    assert [begin for begin, _ in view.charts.epochs] == [
        row.begin_s for row in view.summary.epochs
    ]
    assert set(view.charts.phase_names) == {"evaluation"}
    assert len(view.charts.phases) == 4
    assert len(view.ledger.rows) == 4
    assert (view.outcome, view.tone) == ("ok", "good")
    assert view.started == "2026-01-02 10:03:05 UTC"
    assert view.command == "python train.py --batch-size 128 --workers 2"
    assert "0.6 % of one core" in view.overhead
    assert ("cpu › model", "Intel Xeon Platinum 8480+") in view.environment


def test_notes_tell_what_was_missing_and_lost(tmp_path: Path) -> None:
    missing = {"switches_voluntary": "no rights", "switches_involuntary": "no rights"}
    # Read for most of the run, and missing at its end: that is no news.
    facts = {
        "sensors": {"missing": {**missing, "read": "it is gone"}, "rows_dropped": 1200},
        "troubles": {"the disk is full": 3},
        "hook": {"message": "hook: nothing to attach to"},
    }
    paths = write_run(tmp_path / "run", Plan(seconds=2, epochs=0, facts=facts))
    view = run_view(open_run(paths.folder))
    assert view.notes == (
        "hook: nothing to attach to",
        "Not read: voluntary switches, involuntary switches (no rights)",
        "the disk is full (3 times)",
        "1,200 rows of samples were lost: they could not be written",
    )
    assert view.missing == {**missing, "read": "it is gone"}


def test_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "run", Plan(seconds=450, hertz=10, epochs=2))
    view = run_view(open_run(paths.folder))
    assert any("the mean of every 0.23 s" in note for note in view.notes)
    memory = view.charts.panels[0].lines[0]
    assert memory.low is not None
    assert len(memory.x) <= 2000


@pytest.mark.parametrize("write", [write_empty_run, write_cut_off_run])
def test_every_run_can_be_shown(write: type, tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "run").folder)
    view = derive(run)
    json.dumps(summary_dict(view), allow_nan=False)
    assert len(view.charts.panels) == 3


def test_cut_off_run_is_lost_with_its_last_epoch_cut(tmp_path: Path) -> None:
    view = run_view(open_run(write_cut_off_run(tmp_path / "run").folder))
    assert view.outcome == "lost"
    assert view.ledger.rows[-1][0] == "2 (cut)"
    assert view.charts.seconds < 60


def test_page_asks_for_nothing_and_escapes_everything(tmp_path: Path) -> None:
    ending = {"outcome": "crashed", "reason": NASTY, "evidence": {NASTY: NASTY}}
    facts = {
        "environment": {NASTY: NASTY, "cpu": {"allowed": 2.0}},
        "sensors": {"missing": {NASTY: NASTY}},
        "hook": {"message": NASTY},
    }
    plan = Plan(name=NASTY, command=(NASTY,), seconds=2, ending=ending, facts=facts)
    view = run_view(open_run(write_run(tmp_path / "run", plan).folder))
    told = diagnosis_view(BAD)
    changes = (RecommendationView(NASTY, NASTY, NASTY, NASTY),)
    first = replace(told.first, summary=NASTY, recommendations=changes)
    page = render(page_of(replace(view, finding=replace(told, findings=(first,)))))
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 3
    assert "alert(1)&lt;/script&gt;" in page
    for outside in ("src=", "@import", "url(", 'href="http'):
        assert outside not in page


def test_embedded_json_cannot_end_its_element(folder: Path) -> None:
    view = run_view(open_run(folder))
    charts = replace(view.charts, phases=((NASTY, 1.0, 2.0),))
    page = render(page_of(replace(view, charts=charts)))
    text = page.split('id="run-data">')[1].split("</script>")[0]
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text)["phases"] == [[NASTY, 1.0, 2.0]]


def test_summary_has_null_for_what_is_missing(tmp_path: Path) -> None:
    summary = summary_dict(run_view(open_run(write_empty_run(tmp_path / "run").folder)))
    assert summary["outcome"] == "ok"
    assert summary["samples_per_second"] is None
    assert summary["cores"] is None
    assert summary["epochs"] == []


def test_summary_without_nan(folder: Path) -> None:
    view = run_view(open_run(folder))
    broken = replace(view, summary=replace(view.summary, totals={"read": float("nan")}))
    assert summary_dict(broken)["totals"] == {"read": None}
    assert summary_dict(view)["steps"] == 200


def test_facts_are_flattened() -> None:
    facts = {
        "cpu": {"allowed": 2.0, "quota": None},
        "gpus": [{"name": "A"}],
        "flags": [],
        "git": {"dirty": False},
        "total_bytes": 16e9,
        "os": "x",
    }
    assert flattened(facts) == [
        ("cpu › allowed", "2.0"),
        ("gpus › 0 › name", "A"),
        ("flags", "none"),
        ("git › dirty", "no"),
        ("total_bytes", "16.0 GB"),
        ("os", "x"),
    ]


def test_cost_that_was_not_measured_is_not_told() -> None:
    assert overhead_text({}, 10) == ""
    assert overhead_text({"cores": 0.01}, 10) == "1.0 % of one core (0.10 s of CPU time)"
