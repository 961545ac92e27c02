"""Flags of Python that keep the hook out."""

import pytest

from stepscope.capture.hook_monitor import switched_off_by


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
