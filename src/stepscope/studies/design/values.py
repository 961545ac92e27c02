"""Values in the file of a study: levels of settings and limits, times (`1h30m`), shares (`10%`)."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from yaml import Node, ScalarNode, SequenceNode

from stepscope.analysis.study.records import Level
from stepscope.errors import BadWorkload, StepscopeError
from stepscope.studies.design.nodes import NoValue, Trouble, entries, in_words, is_plain, value_of
from stepscope.studies.trial_spec import NAMES, checked_level, in_design_words, level_text
from stepscope.workloads.own import find_own, is_place
from stepscope.workloads.spec import SETTINGS, nearest, setting_type

_UNITS = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
_PART = re.compile(r"\s*(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"(\d{1,9}(?:\.\d{0,12})?|\.\d{1,12})(?:\s*/\s*(\d{1,9})|\s*(%))?")
DURATION_FORMS = "Give 90s, 30 min, 2h, 1.5h, 1h30m, or seconds"
SHARE_FORMS = "Give 1/2, 0.5 or 50%"


class LevelReader:
    """Tells the trouble with levels, and goes on with the next."""

    def __init__(self, trouble: Trouble, base: Path | None) -> None:
        """`base` is where files of the user's are looked for first; without it they are not."""
        self.trouble = trouble
        self.base = base

    def places(self, node: Node | None, what: str) -> dict[str, Node]:
        """The knobs and limits of a section, with the nodes of their values."""
        found = {}
        for name, place, value in entries(node, self.trouble, what) if node else ():
            if name in NAMES:
                found[name] = value
            else:
                self.trouble.at(
                    place, f"there is no setting or limit {name!r}", nearest(name, NAMES)
                )
        return found

    def settings(self, places: Mapping[str, Node]) -> dict[str, Level]:
        """One level of each."""
        settings: dict[str, Level] = {}
        for name, node in places.items():
            if isinstance(node, SequenceNode):
                self.trouble.at(
                    node, f"{name} should be one value here, not a list", "Lists are for factors"
                )
            else:
                self.level(name, node, settings)
        return settings

    def levels(self, name: str, node: Node) -> list[Level]:
        """All levels of a factor."""
        if not isinstance(node, SequenceNode):
            said = node.value if isinstance(node, ScalarNode) else ""
            hint = f"Put it under fixed, or in a list: [{said}]" if said else "[32, 128]"
            self.trouble.at(node, f"the levels of {name} are a list, not {in_words(node)}", hint)
            return []
        if not node.value:
            self.trouble.at(node, f"{name} has no levels", "Give some, or leave it out")
        levels: dict[Level, int] = {}
        for each in node.value:
            found: dict[str, Level] = {}
            self.level(name, each, found)
            for level in found.values():
                if level in levels:
                    self.trouble.at(each, f"{name} {level_text(name, level)} is there twice")
                levels[level] = 1
        return list(levels)

    def level(self, name: str, node: Node, into: dict[str, Level]) -> None:
        """A checked level, unless it is not one."""
        setting = SETTINGS.get(name)
        kind = setting_type(name) if setting else None
        is_text = name == "model" if setting is None else str in (kind, *typing.get_args(kind))
        try:
            value = value_of(node, is_text)
        except NoValue as error:
            self.trouble.at(node, error.what, error.hint)
            return
        try:
            into[name] = checked_level(name, value)
            if name == "model":
                self._check_own(str(value))
        except StepscopeError as error:
            what, hint = _as_written(name, node, value, error)
            self.trouble.at(node, what, hint)

    def _check_own(self, model: str) -> None:
        """A user's function is looked for at once, without running its file."""
        if self.base is None or not is_place(model):
            return
        named = model.rpartition(":")[0] if ":" in model else model
        is_file = named.endswith(".py") or "/" in named
        try:
            here = Path(named).exists() and not (self.base / named).exists()
            find_own(str(self.base / model) if is_file and not here else model)
        except (OSError, ValueError) as error:
            raise BadWorkload(f"{model!r} cannot be looked for: {error}") from None


def _as_written(name: str, node: Node, value: Any, error: StepscopeError) -> tuple[str, str]:
    """What is wrong with a level, in the words of the file rather than of Python."""
    raw = node.value if isinstance(node, ScalarNode) else ""
    shown = raw if len(raw) <= 60 else f"{raw[:57]}..."
    what, hint = in_design_words(error.message), in_design_words(error.hint)
    if value is None:
        return f"{name} cannot be nothing", "Leave it out for what it usually is"
    if not isinstance(value, str):
        what = what.replace(repr(value), shown).replace(f" {value} ", f" {shown} ")
    if isinstance(value, bool) and shown not in ("true", "false"):
        hint = hint or f"YAML reads {shown} as {str(value).lower()}: put it in quotes if it is text"
    if isinstance(value, str) and isinstance(node, ScalarNode) and not is_plain(node):
        is_bare = re.fullmatch(r"[-+]?\d+(\.\d*)?|true|false|yes|no", value)
        hint = hint or ("Leave the quotes out" if is_bare else "")
    return what, hint


def parse_duration(text: str) -> float:
    """Seconds; ValueError where it is no time, or none at all."""
    parts, end = [], 0
    while end < len(text):
        found = _PART.match(text, end)
        if found is None or found.end() == end:
            raise ValueError(f"{text!r} is no time")
        parts.append((float(found[1]), found[2].lower()))
        end = found.end()
    if not parts or (len(parts) > 1 and any(not unit for _, unit in parts)):
        raise ValueError(f"{text!r} is no time")
    try:
        seconds = sum(number * _UNITS[unit] for number, unit in parts)
    except KeyError as unit:
        raise ValueError(f"{text!r} is no time: there is no unit {unit}") from None
    if not seconds > 0:
        raise ValueError(f"{text!r} is no time at all")
    return seconds


def parse_share(text: str) -> Fraction:
    """A part of a whole, 0 to 1; ValueError where it is none."""
    found = _SHARE.fullmatch(text.strip())
    if found is None or (found[2] is not None and int(found[2]) == 0):
        raise ValueError(f"{text!r} is no part of a whole")
    share = Fraction(found[1]) / (int(found[2]) if found[2] else 100 if found[3] else 1)
    if share > 1:
        raise ValueError(f"{text!r} is more than all")
    return share
