"""What the hook reports is followed as it is written; flags of Python that keep the hook out."""

import os
from pathlib import Path

import pytest

from stepscope.capture.hook_monitor import HookMonitor, switched_off_by
from stepscope.inject import events
from stepscope.runs.paths import make_run_folder
from stepscope.sensors.tree import ProcessTree


def test_a_name_is_known_however_long_ago_it_was_told(tmp_path: Path) -> None:
    paths = make_run_folder(tmp_path / "run")
    tree = ProcessTree(os.getppid())
    monitor = HookMonitor(paths, tree, [], True, "")
    name, version = "a loader with a läng name", "2.1"
    record = events.RECORD.pack(5, events.SEEN, 0, 0, events.name_id(name), events.name_id(version))
    told = events.name_records(name) + events.name_records(version)
    with (paths.events / "77.bin").open("ab", buffering=0) as file:
        for piece in (told[:40], told[40:], record[:10], record[10:]):
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
def test_switched_off(command: str) -> None:
    assert switched_off_by(command.split())


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
def test_not_switched_off(command: str) -> None:
    assert switched_off_by(command.split()) is None
