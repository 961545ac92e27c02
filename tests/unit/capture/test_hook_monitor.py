"""Events are followed as they are written, and Python options that disable the hook are found."""

import os
from pathlib import Path

import pytest

from stepscope.capture.hook_monitor import HookMonitor, disabling_option
from stepscope.inject import events
from stepscope.runs.paths import make_run_folder
from stepscope.sensors.tree import ProcessTree


def test_names_are_kept_between_polls(tmp_path: Path) -> None:
    paths = make_run_folder(tmp_path / "run")
    tree = ProcessTree(os.getppid())
    monitor = HookMonitor(paths, tree, [], True)
    name, version = "a loader with a läng name", "2.1"
    record = events.RECORD.pack(5, events.SEEN, 0, 0, events.name_id(name), events.name_id(version))
    names = events.name_records(name) + events.name_records(version)
    with (paths.events / "77.bin").open("ab", buffering=0) as file:
        for piece in (names[:40], names[40:], record[:10], record[10:]):
            file.write(piece)
            assert not monitor.frameworks
            monitor.poll()
        file.write(events.RECORD.pack(6, events.ATTACHED, 0, 0, events.name_id(name), 0))
        file.write(events.RECORD.pack(7, events.STEP, 0, 0, 1, 0))
    assert not monitor.poll()
    tree.close()
    assert monitor.frameworks == {name: version}
    assert monitor.attached == [name]
    assert tree.trains == {77}


@pytest.mark.parametrize(
    "command",
    [
        "python -I x.py",
        "/usr/bin/python3.11 -uE x.py",
        "python -W ignore -I -m m",
        "python -X dev -S x",
    ],
)
def test_disabling_option(command: str) -> None:
    assert disabling_option(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "python x.py -I",
        "python -c -I",
        "python -m pkg -E",
        "python -W Ignore x.py",
        "python",
        "sh -I",
        "python - -I",
        "python -u x.py",
    ],
)
def test_no_disabling_option(command: str) -> None:
    assert disabling_option(command.split()) == ""
