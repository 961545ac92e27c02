"""From a run folder to its view and derived files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.metrics import BY_KEY
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
    assert findings == {**findings, **summary["diagnosis"]}
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


def test_view_has_the_times_epochs_and_phases_of_the_run(folder: Path) -> None:
    view = run_view(open_run(folder))
    assert view.charts.seconds == 60
    assert [index for _, index in view.charts.epochs] == [1, 2, 3, 4]
    assert [begin for begin, _ in view.charts.epochs] == [
        row.begin_s for row in view.summary.epochs
    ]
    assert set(view.charts.phase_names) == {"evaluation"}
    assert len(view.charts.phases) == 4
    assert len(view.epochs_table.rows) == 4
    assert (view.outcome, view.tone) == ("ok", "good")
    assert view.started == "2026-01-02 10:03:05 UTC"
    assert view.command == "python train.py --batch-size 128 --workers 2"
    assert "0.6% of one core" in view.overhead
    assert ("cpu › model", "Intel Xeon Platinum 8480+") in view.environment


def test_notes_on_missing_and_lost_samples(tmp_path: Path) -> None:
    missing = {"switches_voluntary": "no rights", "switches_involuntary": "no rights"}
    # `read` was available for most of the run, so it is not listed.
    facts = {
        "sensors": {"missing": {**missing, "read": "no such file"}, "rows_dropped": 1200},
        "problems": {"the disk is full": 3},
        "hook": {"reason": "disabled"},
    }
    paths = write_run(tmp_path / "run", Plan(seconds=2, epochs=0, facts=facts))
    view = run_view(open_run(paths.folder))
    switches = ", ".join(BY_KEY[metric].label for metric in missing)
    assert view.notes == (
        "Not tracking epochs and steps automatically: the import hook is disabled",
        f"Not available: {switches} (no rights)",
        "The disk is full (3 times)",
        "1,200 rows of samples were lost because they could not be written",
    )
    assert view.missing == {**missing, "read": "no such file"}


def test_long_run_is_thinned_with_a_note(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "run", Plan(seconds=450, hertz=10, epochs=2))
    view = run_view(open_run(paths.folder))
    assert any("is the mean over 0.23 s" in note for note in view.notes)
    memory = view.charts.panels[0].lines[0]
    assert memory.low is not None
    assert len(memory.x) <= 2000


@pytest.mark.parametrize("write", [write_empty_run, write_cut_off_run])
def test_every_run_can_be_shown(write: type, tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "run").folder)
    view = derive(run)
    json.dumps(summary_dict(view), allow_nan=False)
    assert len(view.charts.panels) == 3


def test_cut_off_run_has_a_partial_last_epoch(tmp_path: Path) -> None:
    view = run_view(open_run(write_cut_off_run(tmp_path / "run").folder))
    assert view.outcome == "lost"
    assert view.epochs_table.rows[-1][0] == "3 (partial)"
    assert view.charts.seconds < 60


def test_page_loads_nothing_and_escapes_everything(tmp_path: Path) -> None:
    exit_status = {"outcome": "crashed", "reason": NASTY, "evidence": {NASTY: NASTY}}
    facts = {
        "environment": {NASTY: NASTY, "cpu": {"allowed": 2.0}},
        "sensors": {"missing": {NASTY: NASTY}},
        "hook": {"reason": "already_running", "other_run": NASTY},
    }
    plan = Plan(name=NASTY, command=(NASTY,), seconds=2, exit_status=exit_status, facts=facts)
    view = run_view(open_run(write_run(tmp_path / "run", plan).folder))
    diagnosis = diagnosis_view(BAD)
    changes = (RecommendationView(NASTY, NASTY, NASTY, NASTY),)
    first = replace(diagnosis.first, summary=NASTY, recommendations=changes)
    page = render(page_of(replace(view, finding=replace(diagnosis, findings=(first,)))))
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 3
    assert "alert(1)&lt;/script&gt;" in page
    for reference in ("src=", "@import", "url(", 'href="http'):
        assert reference not in page


def test_embedded_json_cannot_close_its_element(folder: Path) -> None:
    view = run_view(open_run(folder))
    charts = replace(view.charts, phases=((NASTY, 1.0, 2.0),))
    page = render(page_of(replace(view, charts=charts)))
    text = page.split('id="run-data">')[1].split("</script>")[0]
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text)["phases"] == [[NASTY, 1.0, 2.0]]


def test_missing_values_are_null(tmp_path: Path) -> None:
    summary = summary_dict(run_view(open_run(write_empty_run(tmp_path / "run").folder)))
    assert summary["outcome"] == "ok"
    assert summary["samples_per_second"] is None
    assert summary["cores"] is None
    assert summary["epochs"] == []


def test_nan_is_null(folder: Path) -> None:
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
        "total_bytes": 16 << 30,
        "os": "x",
    }
    assert flattened(facts) == [
        ("cpu › allowed", "2.0"),
        ("gpus › 0 › name", "A"),
        ("flags", "none"),
        ("git › dirty", "no"),
        ("total_bytes", "16.0 GiB"),
        ("os", "x"),
    ]


def test_unmeasured_overhead_is_omitted() -> None:
    assert overhead_text({}, 10) == ""
    assert overhead_text({"cores": 0.01}, 10) == "1.0% of one core (0.10 s of CPU time)"
