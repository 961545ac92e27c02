"""Epochs that are matched in the output."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from conftest import Finished

Watch = Callable[..., Finished]
PythonFile = Callable[[str], str]


@pytest.mark.parametrize(("stream", "at_start"), [("stdout", True), ("stderr", False)])
def test_epochs_from_lines(
    watch: Watch, python_file: PythonFile, stream: str, at_start: bool
) -> None:
    printed = f"print(f'Epoch {{epoch}}/3 loss=0.5', file=sys.{stream}, flush=True)"
    first, last = (printed, "pass") if at_start else ("pass", printed)
    script = python_file(f"""
import sys, time
for epoch in range(1, 4):
    {first}
    time.sleep(0.4)
    {last}
""")
    done = watch(sys.executable, script, options=["--epoch-pattern", r"Epoch (\d+)/"])

    assert done.code == 0
    text = done.out if stream == "stdout" else done.err
    assert text.count("loss=0.5\n") == 3, "the output is forwarded"
    assert "they come from marks or `--epoch-pattern`" in done.err
    run = done.run
    assert (run.path / f"{stream}.log").read_text().count("loss=0.5\n") == 3
    summary = run.summary()
    assert summary.epoch_source == "pattern"
    assert [row.index for row in summary.epochs] == [1, 2, 3]
    seconds = [row.seconds for row in summary.epochs]
    # On a busy machine a line may be read late, even after the end of the command.
    assert min(seconds) > 0 and 0.6 < sum(seconds) < summary.seconds + 0.5


def test_output_is_forwarded_unchanged(watch: Watch) -> None:
    program = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 4096)"
    import subprocess

    done = watch(sys.executable, "-c", program, options=["--epoch-pattern", "x", "-q"], text=False)
    assert done.out == subprocess.run([sys.executable, "-c", program], stdout=-1).stdout


def test_closed_reader_ends_the_command(watch: Watch) -> None:
    """As without stepscope: `yes | head` ends because `yes` gets SIGPIPE."""
    done = watch("sh", "-c", "yes | head -n 3", options=["--epoch-pattern", "never", "-q"])
    assert (done.code, done.out) == (0, "y\ny\ny\n")


def test_output_is_not_stored_without_a_pattern(watch: Watch) -> None:
    run = watch(sys.executable, "-c", "print('secret')").run
    assert not (run.path / "stdout.log").exists()
