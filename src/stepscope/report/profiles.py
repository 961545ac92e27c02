"""The profiles that a trial left, found and shown in one place."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from stepscope.analysis.profile import profile_of
from stepscope.report.profiletable import print_profile, profile_dict
from stepscope.runs.reader import Run
from stepscope.runs.trial import read_profiles


def print_profile_of(console: Console, run: Run) -> None:
    """Write the profile of a trial; nothing where none was asked for."""
    stored = read_profiles(run)
    if stored:
        console.print()
        print_profile(console, profile_of(stored), run.paths.trial)


def profile_dict_of(run: Run) -> dict[str, Any] | None:
    stored = read_profiles(run)
    return profile_dict(profile_of(stored)) if stored else None
