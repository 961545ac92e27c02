"""What a user gets wrong ends in one line, a documented code, and nothing touched."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import STEPSCOPE, Finished
from synthetic import write_run

Watch = Callable[..., Finished]


def check_one_line(done: Finished, *words: str) -> None:
    assert done.out == ""
    assert done.err.startswith("stepscope: ") and done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err
    assert not done.runs.exists() or not list(done.runs.iterdir()), "nothing else is touched"


def test_a_command_that_does_not_exist(watch: Watch) -> None:
    done = watch("no-such-command-anywhere")
    assert done.code == 127
    check_one_line(done, "There is no command no-such-command-anywhere")


def test_a_script_without_its_interpreter(watch: Watch) -> None:
    done = watch("train.py")
    assert done.code == 127
    check_one_line(done, "stepscope run -- python train.py")


def test_a_command_that_cannot_be_executed(watch: Watch, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("text")
    done = watch(str(plain))
    assert done.code == 126
    check_one_line(done, "not executable", "chmod +x")

    plain.chmod(0o755)
    done = watch(str(plain))
    assert done.code == 126
    check_one_line(done, "cannot be executed", "#!/bin/sh")


def test_a_pattern_that_is_no_regex(watch: Watch) -> None:
    done = watch("true", options=["--epoch-pattern", "epoch ("])
    assert done.code == 125
    check_one_line(done, "'epoch ('", "For example")


def test_an_interval_that_is_not_possible(watch: Watch) -> None:
    for interval in ("0", "-1", "nan", "0.001"):
        done = watch("true", options=["--interval", interval])
        assert done.code == 125, interval
        check_one_line(done, "0.02 to 60")


def test_a_folder_that_cannot_be_written(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = watch("true", options=["--out", str(tmp_path / "file" / "runs")])
    assert done.code == 125
    check_one_line(done, "--out DIR")


def test_no_command_and_unknown_options() -> None:
    for arguments in (["run"], ["run", "--"], ["run", "--nonsense", "--", "true"]):
        done = subprocess.run([*STEPSCOPE, *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("kept")
    subprocess.run([*STEPSCOPE, "run", "-q", "--out", str(runs), "--", "true"], check=True)
    (folder,) = runs.iterdir()
    return folder


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "run.json").unlink(), "it has no run.json"),
        (lambda folder: (folder / "run.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "run.json").write_text("[]"), "does not describe a run"),
        (lambda folder: (folder / "run.json").write_text('{"format": 99}'), "Upgrade"),
        (lambda folder: (folder / "run.json").write_text('{"format": 1}'), "lacks clock"),
        (
            lambda folder: (folder / "run.json").write_text(
                '{"format": 1, "clock": {}, "watcher": {}, "ending": {}}'
            ),
            "cannot be understood",
        ),
        (lambda folder: (folder / "host.0000.parquet").write_bytes(b"PAR1"), "cannot be read"),
    ],
)
def test_a_damaged_run_folder(
    kept_run: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = Path(shutil.copytree(kept_run, tmp_path / "run"))
    damage(folder)

    done = subprocess.run([*STEPSCOPE, "report", str(folder)], capture_output=True, text=True)

    assert done.returncode == 3
    assert done.stderr.startswith("stepscope: ") and done.stderr.count("\n") == 1
    assert words in done.stderr


def test_no_such_run(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path / "nowhere")], []):
        done = subprocess.run(
            [*STEPSCOPE, "report", *arguments], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 3
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("report", "--json"), ("top", "--json"), ("report",)])
def test_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    write_run(tmp_path / "run")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*STEPSCOPE, *command, str(tmp_path / "run")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "stepscope: The output cannot be written: No space left on device\n"
