"""The command runs as if without stepscope: its terminal, signals, exit code and environment."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import STEPSCOPE, Finished
from stepscope.runs.reader import latest_run, open_run

Watch = Callable[..., Finished]
PythonFile = Callable[[str], str]

COUNT_SIGNALS = """
import signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *_: got.append("INT"))
signal.signal(signal.SIGTERM, lambda *_: got.append("TERM"))
print("ready", flush=True)
end = time.monotonic() + {seconds}
while time.monotonic() < end and not got: time.sleep(0.02)
if got: time.sleep(0.5)
print("got", ",".join(got), flush=True)
"""
"""Exits shortly after the first signal, so that a second one would be counted."""


WAIT_FOR_SIGNAL, WAIT_BRIEFLY = (COUNT_SIGNALS.replace("{seconds}", s) for s in ("60", "1.2"))


def start(script: str, runs: Path, *options: str, **popen: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*STEPSCOPE, "run", "--out", str(runs), *options, "--", sys.executable, script],
        text=True,
        **popen,  # type: ignore[call-overload]
    )


def read_until(descriptor: int, text: str, seconds: float = 60) -> str:
    seen, end = "", time.monotonic() + seconds
    while text not in seen and time.monotonic() < end:
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                data = os.read(descriptor, 65536)
            except OSError:
                break
            if not data:
                break
            seen += data.decode(errors="replace")
    return seen


def in_terminal(command: list[str]) -> tuple[int, int]:
    """Start a command in a new terminal. Return its pid and the other end of the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    return pid, terminal


@pytest.mark.parametrize("options", [[], ["--epoch-pattern", "epoch (\\d+)"]])
def test_ctrl_c_reaches_the_command_once(
    python_file: PythonFile, tmp_path: Path, options: list[str]
) -> None:
    script = python_file(WAIT_FOR_SIGNAL)
    pid, terminal = in_terminal(
        [*STEPSCOPE, "run", "--out", str(tmp_path / "runs"), *options, "--", sys.executable, script]
    )
    read_until(terminal, "ready")
    os.write(terminal, b"\x03")
    printed = read_until(terminal, "report")
    os.waitpid(pid, 0)
    os.close(terminal)
    assert re.search(r"got INT\r?\n", printed), printed


def test_signal_to_stepscope_is_forwarded(python_file: PythonFile, tmp_path: Path) -> None:
    process = start(python_file(WAIT_FOR_SIGNAL), tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "got TERM\n"
    assert process.wait(60) == 0


def test_stopped_and_continued_at_any_time(python_file: PythonFile, tmp_path: Path) -> None:
    """As with Ctrl-Z and fg. The command must not receive a signal afterwards."""
    process = start(python_file(WAIT_BRIEFLY), tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for _ in range(8):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.11)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.013)
    assert process.stdout.readline() == "got \n"
    assert process.wait(60) == 0


def test_signal_to_the_process_group_reaches_the_command_once(
    python_file: PythonFile, tmp_path: Path
) -> None:
    script = python_file(
        WAIT_FOR_SIGNAL.replace('got.append("TERM")', '(got.append("TERM"), time.sleep(0.2))')
    )
    for sender in ("killpg", "timeout"):
        prefix = ["timeout", "-s", "TERM", "100"] if sender == "timeout" else []
        command = [*prefix, *STEPSCOPE, "run", "-q", "--out", str(tmp_path), "--"]
        process = subprocess.Popen(
            [*command, sys.executable, "-S", script],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if sender == "killpg":
            os.killpg(process.pid, signal.SIGTERM)
        else:  # it signals its whole group, as at the end of the time
            process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "got TERM\n", sender
        process.wait(60)


@pytest.mark.parametrize("options", [[], ["--epoch-pattern", "x"]])
def test_command_has_its_terminal(tmp_path: Path, options: list[str]) -> None:
    program = "import os, sys; print([os.isatty(f) for f in (0, 1, 2)], os.get_terminal_size())"
    pid, terminal = in_terminal(
        [*STEPSCOPE, "run", "--out", str(tmp_path), *options, "--", sys.executable, "-c", program]
    )
    printed = read_until(terminal, "report")
    os.waitpid(pid, 0)
    os.close(terminal)
    assert "[True, True, True]" in printed, printed


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(41)", 41),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_exit_code_is_that_of_the_command(watch: Watch, program: str, code: int) -> None:
    done = watch(sys.executable, "-S", "-c", program, options=["--quiet"])

    assert done.code == code
    assert done.err == ""
    exit_status = done.run.exit_status
    assert exit_status.outcome == ("ok" if code == 0 else "crashed")
    assert (exit_status.exit_code, exit_status.signal) == (
        (code, None) if code >= 0 else (None, signal.Signals(-code).name)
    )


def test_command_survives_a_killed_monitor(python_file: PythonFile, tmp_path: Path) -> None:
    script = python_file("""
import time
for i in range(20):
    print("line", i, flush=True)
    time.sleep(0.05)
print("finished", flush=True)
""")
    for options in ((), ("--epoch-pattern", r"line (\d+)")):
        process = start(script, tmp_path, *options, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == "line 0\n"
        process.kill()
        assert process.stdout.read().endswith("line 19\nfinished\n"), options
        process.wait()
        assert open_run(latest_run(tmp_path)).exit_status.outcome == "lost"


def test_only_two_environment_variables_change(watch: Watch) -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    alone = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    done = watch(sys.executable, "-S", "-c", program, options=["--quiet"])

    import json

    before, under = json.loads(alone.stdout), json.loads(done.out)
    assert {k for k in under if under[k] != before.get(k)} == {"PYTHONPATH", "STEPSCOPE_EVENTS"}
    assert before.keys() <= under.keys()


def test_shadowed_sitecustomize_runs(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.from_user = 42\n")
    program = "import sys, sitecustomize; print(from_user, sitecustomize.__file__, sys.path)"
    path = os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")])
    done = watch(sys.executable, "-c", program, env={**os.environ, "PYTHONPATH": path})

    assert done.code == 0, done.err
    assert done.out.startswith(f"42 {tmp_path}/own/sitecustomize.py")
    assert "inject" not in done.out, "the folder of the hook is not in sys.path"


def test_signal_dispositions_are_unchanged(watch: Watch) -> None:
    program = "grep -E 'Sig(Blk|Ign)' /proc/self/status"

    def masks(printed: str) -> list[int]:
        # Signals 32 and 33 belong to the C library, which ignores them in spawned processes.
        return [int(line.split()[1], 16) & 0x7FFFFFFF for line in printed.splitlines()]

    alone = subprocess.run(["sh", "-c", program], capture_output=True, text=True)
    done = watch("sh", "-c", program, options=["--quiet"])
    assert masks(done.out) == masks(alone.stdout)


def test_script_that_closes_all_descriptors(watch: Watch, python_file: PythonFile) -> None:
    """The hook must not mistake a file of the script for its own closed descriptor."""
    script = python_file("""
import os, stepscope
stepscope.mark("epoch", 0)
os.closerange(3, 4096)
files = [open(f"{__file__}.{i}", "wb") for i in range(200)]
stepscope.mark("epoch", 1)
stepscope.mark("epoch", 2)
print(sum(os.path.getsize(f"{__file__}.{i}") for i in range(200)))
""")
    done = watch(sys.executable, script)

    assert done.out == "0\n"
    values = [mark["value"] for mark in done.run.marks().to_pylist()]
    assert values[0] == "0" and values[-1] == "2"
