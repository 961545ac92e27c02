"""The state folder: what stepscope remembers on this machine, and its lock files."""

from __future__ import annotations

import os
from pathlib import Path

STATE_VARIABLE = "STEPSCOPE_STATE"


def state_folder() -> Path:
    """Return `$STEPSCOPE_STATE`, `$XDG_STATE_HOME/stepscope` or `~/.local/state/stepscope`."""
    if folder := os.environ.get(STATE_VARIABLE):
        return Path(folder)
    home = os.path.expanduser("~")
    if home == "~":  # the user does not have a home directory
        home = "/nonexistent"
    return Path(os.environ.get("XDG_STATE_HOME") or f"{home}/.local/state") / "stepscope"
