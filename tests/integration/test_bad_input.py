"""Invalid input ends with one line and a documented exit code, and changes nothing."""

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
    assert not done.runs.exists() or not list(done.runs.iterdir()), "no run folder is left"


def test_command_not_found(watch: Watch) -> None:
    done = watch("no-such-command-anywhere")
    assert done.code == 127
    check_one_line(done, "Command not found: `no-such-command-anywhere`")


def test_script_without_its_interpreter(watch: Watch) -> None:
    done = watch("train.py")
    assert done.code == 127
    check_one_line(done, "stepscope run -- python train.py")


def test_command_not_executable(watch: Watch, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("text")
    done = watch(str(plain))
    assert done.code == 126
    check_one_line(done, "not executable", "chmod +x")

    plain.chmod(0o755)
    done = watch(str(plain))
    assert done.code == 126
    check_one_line(done, "cannot be executed", "#!/bin/sh")


def test_invalid_epoch_pattern(watch: Watch) -> None:
    done = watch("true", options=["--epoch-pattern", "epoch ("])
    assert done.code == 125
    check_one_line(done, "'epoch ('", "for example")


def test_interval_out_of_range(watch: Watch) -> None:
    for interval in ("0", "-1", "nan", "0.001"):
        done = watch("true", options=["--interval", interval])
        assert done.code == 125, interval
        check_one_line(done, "0.02 to 60")


def test_unwritable_output_folder(watch: Watch, tmp_path: Path) -> None:
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
        (lambda folder: (folder / "run.json").write_text("[]"), "is not the run.json of a run"),
        (lambda folder: (folder / "run.json").write_text('{"format": 99}'), "Upgrade"),
        (lambda folder: (folder / "run.json").write_text('{"format": 1}'), "has no `clock`"),
        (
            lambda folder: (folder / "run.json").write_text(
                '{"format": 1, "clock": {}, "monitor": {}, "exit_status": {}}'
            ),
            "is invalid",
        ),
        (lambda folder: (folder / "host.0000.parquet").write_bytes(b"PAR1"), "cannot be read"),
    ],
)
def test_damaged_run_folder(
    kept_run: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = Path(shutil.copytree(kept_run, tmp_path / "run"))
    damage(folder)

    done = subprocess.run([*STEPSCOPE, "report", str(folder)], capture_output=True, text=True)

    assert done.returncode == 3
    assert done.stderr.startswith("stepscope: ") and done.stderr.count("\n") == 1
    assert words in done.stderr


def test_missing_run(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path / "missing")], []):
        done = subprocess.run(
            [*STEPSCOPE, "report", *arguments], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 3
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("report", "--json"), ("top", "--json"), ("report",)])
def test_unwritable_output_is_reported_in_one_line(
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
    assert done.stderr == "stepscope: Cannot write to standard output: No space left on device\n"
