"""The docs say what is so: nothing generated is stale, every link leads somewhere, examples run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import stepscope
from conftest import STEPSCOPE, trial_environment
from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.cli.console import EXIT_CODES
from stepscope.inject import events
from stepscope.opened_run import OpenedRun, open_run
from stepscope.records import Outcome
from stepscope.report.study.export import TABLES, study_dict
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import Run, latest_run
from stepscope.steplog import FIELDS, RECORD
from stepscope.studies.design.file import KEYS, read_design
from stepscope.studies.design.points import default_reference, points_of
from studies import planted_environment
from synthetic import write_cut_off_run
from synthetic_studies import usual_study

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINKED = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *PAGES]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HTML_LINK = re.compile(r'(?:src|srcset|href)="([^"\s]+)"')
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

JUDGED_WITHOUT_STEPS = {"io.wait", "gpu.idle", "too_short", "unknown"}

MARKS = """
import time, stepscope
for epoch in range(3):
    stepscope.mark("epoch", epoch)
    time.sleep(0.1)
with stepscope.phase("a name that is longer than one record can hold"):
    pass
stepscope.mark("a name that is longer than one record can hold", 1.5)
"""


def links_of(page: Path) -> list[str]:
    """Where a page leads to within the repository."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    found = _LINK.findall(text) + _HTML_LINK.findall(text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


def blocks_of(page: str, language: str, word: str) -> list[str]:
    """The code blocks of a page that contain a word."""
    found = _FENCE.findall((DOCS / page).read_text(encoding="utf-8"))
    return [code for kind, code in found if kind == language and word in code]


def run_python(program: str, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `stepscope run` was called."""
    folder = tmp_path_factory.mktemp("docs")
    command = [*STEPSCOPE, "run", "-q", "--out", "runs", "--", sys.executable, "-c", MARKS]
    subprocess.run(command, check=True, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> OpenedRun:
    return open_run(latest_run(folder / "runs"))


def test_generated_parts_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_generated_parts_are_noticed_when_stale(tmp_path: Path) -> None:
    for file in (*DOCS.glob("*.py"), *PAGES):
        shutil.copy(file, tmp_path)
    for page, word in (
        ("metrics.md", "`rss`"),
        ("cli.md", "`trial`: `shm_full`"),
        ("json.md", "`noise_dof`"),
        ("workloads.md", "`batch_size`"),
        ("explain.md", "`host_ahead`"),
    ):
        text = (tmp_path / page).read_text()
        row = text.index(f"| {word} |")
        (tmp_path / page).write_text(text[:row] + text[row:].replace(word, "`stale`", 1))

    check = [sys.executable, str(tmp_path / "generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)

    assert done.returncode == 1
    stale = set(re.findall(r"[\w-]+\.md", done.stderr))
    assert stale >= {"cli.md", "explain.md", "json.md", "metrics.md", "workloads.md"}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:src|tests|benchmarks|examples)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_kind_of_event_is_described() -> None:
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    described = {name: int(kind) for kind, name in re.findall(r"^\| (\d+) \| `(\w+)`", text, re.M)}
    assert described == {name: getattr(events, name) for name in described}
    assert sorted(described.values()) == list(range(1, events.LAST_KIND + 1))


def test_what_is_left_without_each_cause_is_described() -> None:
    text = (DOCS / "explain.md").read_text(encoding="utf-8")
    part = text[text.index("## Speed-up bound") : text.index("## Confidence")]
    named = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", part, re.M)))
    blamed = {key for key, cause in CAUSES.items() if cause.kind != "healthy"}
    blamed -= JUDGED_WITHOUT_STEPS
    assert {key for key in blamed if not any(fnmatch(key, name) for name in named)} == set()
    assert [name for name in named if not any(fnmatch(key, name) for key in blamed)] == []


def test_every_outcome_is_described() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    for outcome in Outcome:
        assert f"`{outcome.value}`" in text


def test_every_outcome_of_a_trial_is_described_with_its_code() -> None:
    text = (DOCS / "trials.md").read_text(encoding="utf-8")
    described = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.M))
    assert described == {outcome.value: str(code) for outcome, code in EXIT_CODES.items()}


def test_every_key_of_run_json_is_described(run: Run) -> None:
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    for key in (*run.json, *run.json["environment"]):
        assert f"`{key}`" in text, key


def test_every_file_of_a_trial_is_described() -> None:
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    paths = RunPaths(Path())
    of_ranks = (paths.trial_rank, paths.trial_steps, paths.trial_profile, paths.trial_trace)
    for file in (paths.trial_spec, paths.trial_stacks, *(of_rank(0) for of_rank in of_ranks)):
        assert f"`{file.name}`" in text, file.name


def test_the_record_of_a_step_is_described() -> None:
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    part = text[text.index("`steps<N>.bin`") : text.index("## `derived/`")]
    rows = re.findall(r"^\| (\d+)–(\d+) \| int64 \| `(\w+)`", part, re.M)
    assert [name for _, _, name in rows] == list(FIELDS)
    assert [(int(a), int(b)) for a, b, _ in rows] == [(8 * i, 8 * i + 7) for i in range(len(rows))]
    assert f"records of {RECORD.size} bytes" in part and f'"{RECORD.format}"' in part


def test_the_trial_example_runs_and_all_that_it_leaves_is_described(tmp_path: Path) -> None:
    (example,) = blocks_of("trials.md", "python", "stepscope.trial")

    printed = run_python(example, cwd=tmp_path, env=trial_environment(tmp_path))

    assert printed.startswith("ok ")
    run = open_run(latest_run(tmp_path / "runs"))
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    facts, rank = run.json, json.loads(run.paths.trial_rank(0).read_text())
    spec = json.loads(run.paths.trial_spec.read_text())
    for key in (*facts, *facts["trial"], *facts["limits"], *facts["limits"]["cpus"], *rank, *spec):
        assert f"`{key}`" in text, key
    for file in run.paths.trial.iterdir():
        assert f"`{file.name}`" in text, file.name


@pytest.mark.parametrize("example", blocks_of("workloads.md", "python", "def workload"))
def test_the_workload_examples_run(example: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example)
    command = [*STEPSCOPE, "trial", "train.py:workload", "--steps", "3", "--json", "-q"]

    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=trial_environment(tmp_path)
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3


def test_the_run_folder_example_runs(run: Run, tmp_path: Path) -> None:
    (example,) = blocks_of("run-folder.md", "python", "pyarrow")

    printed = run_python(example, str(run.path), cwd=tmp_path)

    summary = run.summary()
    assert f"{run.name} ok\n" in printed
    assert f"{summary.core_seconds:.3f} core-seconds" in printed
    assert re.findall(r": epoch (\d)\n", printed) == ["0", "1", "2"]
    assert printed.count("a name that is longer than one record can hold") == 1


def test_the_run_folder_example_runs_on_a_run_that_was_cut_off(tmp_path: Path) -> None:
    (example,) = blocks_of("run-folder.md", "python", "pyarrow")
    paths = write_cut_off_run(tmp_path / "cut")

    printed = run_python(example, str(paths.folder), cwd=tmp_path)

    core_seconds = open_run(paths.folder).summary().core_seconds
    assert f"{core_seconds:.3f} core-seconds" in printed


def test_the_quickstart_example_runs(folder: Path) -> None:
    (example,) = blocks_of("quickstart.md", "python", "open_run")

    printed = run_python(example, cwd=folder)

    assert " ok\n" in printed and "cores" in printed and "MiB" in printed


@pytest.mark.parametrize("word", ["stepscope.mark", "stepscope.watch", "explain()", "errors"])
def test_the_cheap_python_examples_run(word: str, folder: Path, tmp_path: Path) -> None:
    (example,) = blocks_of("python.md", "python", word)
    shutil.copytree(folder / "runs", tmp_path / "runs")

    run_python(example, cwd=tmp_path)


def test_every_public_name_is_described() -> None:
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    for name in stepscope.__all__:
        assert name == "__version__" or f"`{name}`" in text, name


@pytest.mark.parametrize("example", blocks_of("studies.md", "yaml", "factors"))
def test_the_designs_of_the_docs_can_be_used(example: str, tmp_path: Path) -> None:
    file = tmp_path / "design.yaml"
    file.write_text(example)
    assert points_of(read_design(file)).chosen


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "study").glob("*.yaml")), ids=str)
def test_the_example_studies_can_be_used(file: Path) -> None:
    design = read_design(file)
    points = points_of(design)
    assert points.chosen and default_reference(design, points)


def test_the_files_of_a_study_are_described(tmp_path: Path) -> None:
    text = (DOCS / "studies.md").read_text(encoding="utf-8")
    for name in (*TABLES, *KEYS):
        assert f"`{name}`" in text, name
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    for key in study_dict(usual_study(tmp_path)):
        assert f"`{key}`" in text, key


def test_the_study_example_runs(tmp_path: Path) -> None:
    """With a design of the same name whose trials are made up: those of the docs take minutes."""
    (example,) = blocks_of("studies.md", "python", "stepscope.study")
    folder = tmp_path / "examples" / "study"
    folder.mkdir(parents=True)
    text = "name: two-cores\nworkload: cnn\nfixed: {framework: made_up.loop, data: random}\n"
    (folder / "two_cores.yaml").write_text(f"{text}factors: {{batch_size: [8, 16]}}\n")
    printed = run_python(
        example, cwd=tmp_path, env=planted_environment(tmp_path, formula="10 * batch_size")
    )
    assert printed.startswith("batch_size 2.0") and "'batch_size': 8" in printed


def test_the_walks_are_true() -> None:
    """Each hop in architecture.md is a function or class in the file that it names."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    hops = re.findall(r"`([a-z_0-9/]+\.py):(\w+)`", text)
    assert len(hops) > 35
    for file, name in hops:
        source = (ROOT / "src" / "stepscope" / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(?:def|class) {name}\b", source, re.MULTILINE), f"{file}:{name}"
    for walk in text.split("## Call paths")[1].split("## Decisions")[0].split("**`stepscope ")[1:]:
        assert len(re.findall(r"^\d+\.", walk, re.MULTILINE)) <= 12
