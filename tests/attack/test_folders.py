"""A folder of somebody else does not harm its reader: a test for each fault that was found.

`fuzz.py` searches for more of them. Commands run as real processes with a limit of memory.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from conftest import STEPSCOPE
from planted import unpack
from stepscope.errors import RunFolderError
from stepscope.inject import events
from stepscope.opened_run import open_run
from stepscope.records import Entity
from stepscope.report.run.derive import derive
from stepscope.runs.events import RECORD
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import StreamWriter
from synthetic import BEGIN_NS, MAIN_PID, Plan, write_run
from synthetic_trials import write_trial

STUDY = Path(__file__).parents[1] / "data" / "folders" / "study.tar.xz"
EVENTS = f"events/{MAIN_PID}.bin"
SECRET = "a file of the reader"
ESCAPE = "\x1b]0;owned\x07\x1b[31m"
MEMORY_KIB = 4_000_000
"""Address space of a command, which needs about half of it."""


def stepscope(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    limited = ["sh", "-c", f'ulimit -v {MEMORY_KIB}; exec "$@"', "sh", *STEPSCOPE]
    return subprocess.run(
        [*limited, *map(str, arguments)], capture_output=True, text=True, timeout=20
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 20 s whose samples are not packed."""
    return write_run(tmp_path / "run", Plan(seconds=20)).folder


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A recorded study of eight trials."""
    return unpack(STUDY, tmp_path)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that is not to be read or changed."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.json").write_text(SECRET)
    return folder


def is_refused(done: subprocess.CompletedProcess[str], words: str) -> bool:
    """Return whether a command ended with an error of one line that has these words."""
    return is_harmless(done) and done.returncode != 0 and words in done.stderr


def is_harmless(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode in (0, 3, 6) and "Traceback" not in done.stderr


def trial_of(study: Path) -> Path:
    return min(study.glob("*/r1a1"))


# 1. Links


def test_files_with_predictable_names_are_not_written(run: Path, outside: Path) -> None:
    """Links with the names of temporary files led to files of the reader's home."""
    (run / "derived").mkdir()
    for name in ("summary.json", "findings.json", "report.html"):
        (run / "derived" / f".{name}.{os.getpid()}.tmp").symlink_to(outside / "secret.json")
    derive(open_run(run))
    assert (outside / "secret.json").read_text() == SECRET
    assert (run / "derived" / "report.html").stat().st_size > 10_000


def test_links_to_other_runs_are_not_followed(run: Path, tmp_path: Path) -> None:
    """A folder without run.json is a folder of runs, of which the newest is shown."""
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "link").symlink_to(run)
    assert is_refused(stepscope("report", tmp_path / "sent"), "is not a run folder")
    assert not (run / "derived").exists()


@pytest.mark.parametrize("name", ["run.json", "process.arrows", EVENTS, "events", "derived"])
def test_links_in_a_run_are_refused(run: Path, outside: Path, name: str) -> None:
    if name != "derived":
        shutil.move(run / name, outside / "moved")
        (run / name).symlink_to(outside / "moved")
    else:
        (run / name).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    assert is_refused(stepscope("report", run), f"{name} is a symbolic link")
    assert sorted(outside.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("TRIAL", "show"),
        ("ledger", "show"),
        ("study.json", "show"),
        ("design.yaml", "plan"),
        ("derived", "report"),
        ("TRIAL/stdout.log", "merge"),
        ("derived", "merge"),
    ],
)
def test_links_in_a_study_are_refused(
    study: Path, outside: Path, name: str, command: str, tmp_path: Path
) -> None:
    other, merged = shutil.copytree(study, tmp_path / "other"), tmp_path / "merged"
    path = study / name.replace("TRIAL", str(trial_of(study).relative_to(study)))
    if path.exists():
        shutil.move(path, outside / "moved")
    path.symlink_to(outside / "moved" if (outside / "moved").exists() else outside)
    before = sorted(outside.rglob("*"))
    more = [other, "--out", merged] if command == "merge" else []
    assert is_refused(stepscope("study", command, study, *more), "is a symbolic link")
    assert sorted(outside.rglob("*")) == before and not merged.exists()


def test_link_to_the_facts_of_a_trial_is_not_followed(study: Path, outside: Path) -> None:
    shutil.rmtree(study / "ledger")  # else the trial is not read
    shutil.move(trial_of(study) / "run.json", outside / "moved")
    (trial_of(study) / "run.json").symlink_to(outside / "moved")
    done = stepscope("study", "show", study)
    assert done.returncode == 0 and "run.json is a symbolic link" in " ".join(done.stdout.split())


def test_links_of_a_merged_study_are_refused(study: Path, outside: Path, tmp_path: Path) -> None:
    other, merged = shutil.copytree(study, tmp_path / "other"), tmp_path / "merged"
    assert stepscope("study", "merge", study, other, "--out", merged).returncode == 0
    machine = min((merged / "machines").iterdir())
    shutil.move(machine, outside / "moved")
    machine.symlink_to(outside / "moved")
    assert is_refused(stepscope("study", "show", merged), "is a symbolic link")


@pytest.mark.parametrize("name", ["program.json", "program.bin"])
def test_a_merged_study_has_the_permissions_of_the_umask(
    study: Path, tmp_path: Path, name: str
) -> None:
    """A program of somebody else would run with the rights of its new owner."""
    other, merged = shutil.copytree(study, tmp_path / "other"), tmp_path / "merged"
    (trial_of(study) / name).write_bytes(b"\x7fELF")
    (trial_of(study) / name).chmod(0o4755)
    assert stepscope("study", "merge", study, other, "--out", merged).returncode == 0
    (program,) = merged.rglob(name)
    assert program.stat().st_mode & 0o7111 == 0


# 2. Files that are not regular or too large


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def make_sparse(path: Path) -> None:
    os.truncate(path, 3 << 30)


SPECIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "a FIFO": (make_fifo, "is not a regular file"),
    "/dev/zero": (make_endless, "is a symbolic link"),
    "sparse": (make_sparse, "MiB"),
}


@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [
        ("run.json", "a FIFO", "report"),
        ("process.arrows", "a FIFO", "explain"),
        (EVENTS, "a FIFO", "top"),
        ("trial/rank0.json", "a FIFO", "report"),
        ("trial/steps0.bin", "a FIFO", "report"),
        ("run.json", "/dev/zero", "top"),
        ("process.arrows", "/dev/zero", "report"),
        (EVENTS, "/dev/zero", "explain"),
        ("run.json", "sparse", "explain"),
        ("process.arrows", "sparse", "top"),
        (EVENTS, "sparse", "report"),
        ("trial/steps0.bin", "sparse", "report"),
    ],
)
def test_special_files_in_a_run_are_refused(
    tmp_path: Path, name: str, kind: str, command: str
) -> None:
    run = write_trial(tmp_path / "run").folder
    make, words = SPECIAL[kind]
    make(run / name)
    assert is_refused(stepscope(command, run), words)


@pytest.mark.parametrize(
    ("pattern", "kind", "command"),
    [
        ("study.json", "a FIFO", "show"),
        ("design.yaml", "a FIFO", "plan"),
        ("ledger/*.jsonl", "a FIFO", "plan"),
        ("runner.lock", "a FIFO", "show"),
        ("study.json", "/dev/zero", "show"),
        ("ledger/*.jsonl", "/dev/zero", "show"),
        ("design.yaml", "sparse", "plan"),
        ("ledger/*.jsonl", "sparse", "show"),
    ],
)
def test_special_files_in_a_study_are_refused(
    study: Path, pattern: str, kind: str, command: str
) -> None:
    make, words = SPECIAL[kind]
    make(next(study.glob(pattern)))
    assert is_refused(stepscope("study", command, study), words)


def write_equal_rows(run: Path, rows: int) -> None:
    """Replace the samples by a Parquet file of less than a megabyte."""
    (run / "process.arrows").unlink()
    columns = {"t_ns": BEGIN_NS, "window_s": 0.1, "entity": "tree", "cpu": 1.0, "rss": 1.0}
    table = pa.table({name: pa.repeat(value, rows) for name, value in columns.items()})
    table = table.append_column("pid", pa.nulls(rows, pa.int32()))
    parquet.write_table(table, run / "process.0000.parquet", compression="zstd")


@pytest.mark.parametrize("command", [("report",), ("top", "--json")])
def test_small_file_with_many_equal_rows(run: Path, command: tuple[str, ...]) -> None:
    """20 million rows took 3.8 GB of memory."""
    write_equal_rows(run, 20_000_000)
    assert (run / "process.0000.parquet").stat().st_size < 1_000_000
    assert is_harmless(stepscope(*command, run))
    with pytest.raises(RunFolderError, match="too many values"):
        open_run(run).samples()


def test_many_small_files_with_equal_rows(run: Path) -> None:
    """Each was within the limits, and all of them together took 5.5 GB."""
    write_equal_rows(run, 2_000_000)
    for number in range(1, 12):
        shutil.copy(run / "process.0000.parquet", run / f"process.{number:04}.parquet")
    assert is_refused(stepscope("report", run), "too many values for the size of the files")
    assert is_harmless(stepscope("top", "--json", run))


def test_many_marks_are_read_quickly(run: Path) -> None:
    """3 million took 11 s and 1 GB."""
    records = np.zeros(3_000_000, RECORD)
    records["t"] = np.arange(len(records)) + BEGIN_NS
    records["kind"] = events.MARK
    records["a"] = events.name_id("step")
    with (run / EVENTS).open("ab") as file:
        records.tofile(file)
    assert stepscope("explain", "--json", run).returncode == 0


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_small_file_with_long_texts(run: Path, kind: pa.DataType) -> None:
    """Equal texts are stored once: ten gigabytes in a few kilobytes."""
    rows = 100_000
    texts = pa.DictionaryArray.from_arrays(pa.repeat(0, rows), pa.array(["x" * rows], kind))
    keys = {"t_ns": pa.repeat(1, rows), "window_s": pa.repeat(1.0, rows), "entity": texts}
    table = pa.table({**keys, "pid": pa.nulls(rows, pa.int32())})
    parquet.write_table(table, run / "process.0000.parquet", compression="zstd")
    (run / "process.arrows").unlink()
    assert is_harmless(stepscope("top", "--json", run))
    with pytest.raises(RunFolderError, match=r"are too long|unexpected type"):
        open_run(run).samples()


def test_many_entities_are_refused(run: Path) -> None:
    """Each of them was compared with each row."""
    writer = StreamWriter(RunPaths(run), "gpu")
    for number in range(100_000):
        writer.append(BEGIN_NS, 0.1, Entity(f"GPU-{number}"), {"gpu_power": 1.0})
    writer.flush()
    assert is_refused(stepscope("report", run), "100,000 entities")


# 5. Missing samples


def core_seconds(run: Path) -> float:
    total = open_run(run).summary().core_seconds
    assert total is not None
    return total


def notes_of(run: Path) -> str:
    return "\n".join(json.loads(stepscope("report", "--json", run).stdout)["notes"])


@pytest.mark.parametrize("position", [0.3, 0.5, 0.7])
def test_samples_after_a_damaged_byte_are_read(run: Path, position: float) -> None:
    whole, data = core_seconds(run), bytearray((run / "process.arrows").read_bytes())
    batch = data.index(b"\xff\xff\xff\xff", int(position * len(data)))
    data[batch + 4] ^= 1  # the length of its metadata
    (run / "process.arrows").write_bytes(data)
    assert core_seconds(run) == pytest.approx(whole, rel=0.12)
    assert "Process samples are missing (time since the start: " in notes_of(run)


def test_missing_segment_is_reported(run: Path) -> None:
    (run / "host.arrows").unlink()
    writer = StreamWriter(RunPaths(run), "host")
    for second in range(1, 20):
        writer.append(BEGIN_NS + second * 10**9, 1.0, Entity("host"), {"host_cpu": 1.0})
        if second % 5 == 0:
            writer.flush()
            writer.roll(at_least=1)
    writer.flush()
    writer.close()
    (run / "host.0001.arrows").unlink()
    assert "Host samples are missing (time since the start: 5.0 s to 11.0 s)" in notes_of(run)


def test_events_of_another_time_namespace_are_reported(run: Path) -> None:
    """They became an epoch of 86,400 s."""
    records = np.fromfile(run / EVENTS, RECORD)
    records["t"][records["kind"] != events.NAME] += 86_400 * 10**9
    records.tofile(run / EVENTS)
    summary = open_run(run).summary()
    assert not summary.epochs and summary.seconds == pytest.approx(20)
    assert "ignored because their times lie outside the run" in notes_of(run)


# 8. Ledger


def ledger_of(study: Path) -> Path:
    (path,) = (study / "ledger").iterdir()
    return path


def test_ledger_of_damaged_lines_is_not_read_to_the_end(study: Path) -> None:
    with ledger_of(study).open("ab") as file:
        file.write(b"{}\n" * 10_000_000)
    done = stepscope("study", "show", study)
    assert done.returncode == 0 and "8 trials" in done.stdout
    assert "more than 1000 lines" in done.stdout


@pytest.mark.parametrize(
    ("levels", "rules", "words"),
    [
        (f"[{'1, ' * 80_000}1]", 0, "Duplicate level 1"),
        (f"{list(range(1, 2001))}", 8000, "8,000 rules are too many for 2,000 combinations"),
    ],
    ids=["levels", "rules"],
)
def test_long_design(study: Path, levels: str, rules: int, words: str) -> None:
    """The line of each problem was copied, and each rule was applied to each combination."""
    design = study / "design.yaml"
    skip = "skip:" + "\n- batch_size == 3" * rules if rules else ""
    design.write_text(f"workload: cnn\nfactors:\n  batch_size: {levels}\n{skip}\n")
    assert is_refused(stepscope("study", "plan", design), words)


@pytest.mark.parametrize("tail", ['{"key": "' + "a" * (256 << 10), "[" * (256 << 10)])
def test_long_line_without_an_end(study: Path, tail: str) -> None:
    """It took more than two minutes."""
    with ledger_of(study).open("a") as file:
        file.write(tail)
    done = stepscope("study", "show", study)
    assert done.returncode == 0 and "8 trials" in done.stdout


@pytest.mark.parametrize(
    "changed",
    [
        {"key": 7},
        {"attempt": -1},
        {"values": {"samples_per_second": "fast"}},
        {"started": float("nan")},
        {"started": -1e300},
        {"interference": 3},
    ],
    ids=str,
)
def test_lines_with_wrong_types_are_rebuilt(study: Path, changed: dict[str, Any]) -> None:
    path = ledger_of(study)
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), **changed}), *others, ""]))
    done = stepscope("study", "show", study)
    assert done.returncode == 0, done.stderr
    assert "8 trials" in done.stdout and "1 line of the list of results" in done.stdout


def test_many_attempts_are_fast(study: Path) -> None:
    """The attempts at a trial were sorted for each of them."""
    first = json.loads(ledger_of(study).read_text().splitlines()[0])
    lost = {**first, "outcome": "lost", "values": {}}
    with ledger_of(study).open("a") as file:
        file.writelines(json.dumps({**lost, "attempt": n}) + "\n" for n in range(2, 30_000))
    assert stepscope("study", "show", study).returncode == 0


# 9. Tracebacks


def change_facts(**changed: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**facts, **changed}))

    return change


def nest_deeply(run: Path) -> None:
    (run / "run.json").write_text("[" * 100_000 + "]" * 100_000)


def make_windows_infinite(run: Path) -> None:
    (run / "process.arrows").unlink()
    writer = StreamWriter(RunPaths(run), "process")
    for number, window in enumerate((0.1, float("inf"), float("nan"), 1e308, -1.0), 1):
        values = {"cpu": float("inf") if number == 2 else 1e308, "rss": float("nan")}
        writer.append(BEGIN_NS + number * 10**8, window, Entity("tree"), values)
    writer.flush()


def make_folder_of_samples(run: Path) -> None:
    (run / "process.arrows").unlink()
    (run / "process.arrows").mkdir()


def make_socket_of_events(run: Path) -> None:
    (run / EVENTS).unlink()
    before = os.getcwd()
    os.chdir(run / "events")  # the address of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(Path(EVENTS).name)
    finally:
        os.chdir(before)


def write_impossible_events(run: Path) -> None:
    records = np.fromfile(run / EVENTS, RECORD)
    rank = np.zeros(1, RECORD)
    rank["t"], rank["kind"], rank["a"] = records["t"].max(), events.RANK, 2**40
    for field in ("a", "b"):
        records[field][records["kind"] == events.BATCH] = -(2**63)
    np.concatenate([records[::-1], rank]).tofile(run / EVENTS)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deep nesting": nest_deeply,
    "damaged monitor": change_facts(monitor={"pid": "x", "started_ticks": [], "boot_id": 1e300}),
    "damaged evidence": change_facts(exit_status={"outcome": "crashed", "evidence": ["x"]}),
    "number out of range": change_facts(clock={"monotonic_ns": 10**400, "wall_ns": 0}),
    "lone surrogates": change_facts(command=["\ud800", "\udfff"], name="\ud800"),
    "infinite windows": make_windows_infinite,
    "folder of samples": make_folder_of_samples,
    "socket of events": make_socket_of_events,
    "impossible events": write_impossible_events,
}


@pytest.mark.parametrize("command", ["report", "top"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_runs_end_without_a_traceback(run: Path, damage: str, command: str) -> None:
    DAMAGE[damage](run)
    done = stepscope(command, run, "--json")
    assert is_harmless(done), done.stderr
    if done.returncode == 0:
        json.loads(done.stdout, parse_constant=pytest.fail)  # NaN and Infinity


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_runs_raise_only_errors_of_stepscope(run: Path, damage: str) -> None:
    DAMAGE[damage](run)
    for method in ("steps", "marks", "samples", "summary", "explain"):
        try:
            getattr(open_run(run), method)()
        except RunFolderError:
            pass


@pytest.mark.parametrize("pattern", ["study.json", "ledger/*.jsonl"])
@pytest.mark.parametrize("kind", ["deep nesting", "folder"])
def test_damaged_studies_end_without_a_traceback(study: Path, pattern: str, kind: str) -> None:
    path = next(study.glob(pattern))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 100_000 + "\n")
    assert is_harmless(stepscope("study", "show", study))


# 12. Escape sequences


@pytest.mark.parametrize("command", ["show", "merge"])
@pytest.mark.parametrize("key", ["machine", "name"])
def test_escape_sequences_of_a_study_are_not_printed(
    study: Path, tmp_path: Path, key: str, command: str
) -> None:
    other, merged = shutil.copytree(study, tmp_path / "other"), tmp_path / "merged"
    facts = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps({**facts, key: ESCAPE}))
    more = [other, "--out", merged] if command == "merge" else []
    done = stepscope("study", command, study, *more)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_escape_sequences_of_a_folder_name_are_not_printed(study: Path) -> None:
    hostile = study.rename(study.with_name(f"{ESCAPE}study"))
    done = stepscope("study", "report", hostile)
    assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr


def test_escape_sequences_of_a_design_are_not_printed(study: Path) -> None:
    (study / "design.yaml").write_text('workload: "\\e[31mred"\nfactors: {batch_size: [1]}\n')
    done = stepscope("study", "show", study)
    assert done.returncode in (0, 6) and "\x1b" not in done.stdout + done.stderr
