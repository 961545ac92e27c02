"""Reads the file of a study. All that is wrong with it is told at once, line by line."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import StepscopeError
from stepscope.studies.constraints import BadRule, Rule, make_rule
from stepscope.studies.design import Budget, Choice, Design
from stepscope.studies.designlevels import LevelReader
from stepscope.studies.designnodes import (
    NoValue,
    Trouble,
    entries,
    in_words,
    is_nothing,
    is_plain,
    open_design,
    value_of,
)
from stepscope.studies.designtexts import (
    DURATION_FORMS,
    SHARE_FORMS,
    parse_duration,
    parse_share,
)
from stepscope.studies.spec import NAMES, in_design_words, make_spec
from stepscope.workloads.spec import nearest

KEYS = (
    "name",
    "workload",
    "fixed",
    "factors",
    "skip",
    "repeats",
    "choose",
    "seed",
    "budget",
    "blocks",
    "oom",
)
_NAME = re.compile(r"\w(?:[\w .+-]{0,98}[\w+-])?")
_DIGEST_LENGTH = 12
MOST_REPEATS = 1000
_CHOICES = "Give full, {fraction: 1/2} or {random: 40}"
_OFF = (None, False, "none")


def read_design(path: Path, is_kept: bool = False) -> Design:
    """The study that a file describes; BadDesign lists what is wrong with it.

    Of one that was kept in the folder of its study, the files that it names may be elsewhere.
    """
    text, root, trouble = open_design(path)
    design = _Sections(root, trouble, None if is_kept else path.parent).design()
    trouble.raise_if_any()
    return dataclasses.replace(design, name=design.name or path.stem, file=path, text=text)


def design_digest(design: Design) -> str:
    """The same for the same trials: whatever the spacing, the comments, the budget, the repeats."""
    told = {
        "fixed": dict(design.fixed),
        "factors": [[factor.name, list(factor.levels)] for factor in design.factors],
        "rules": sorted(ast.unparse(ast.parse(rule.plain, mode="eval")) for rule in design.rules),
        "choice": [str(design.choice.fraction), design.choice.random],
        "seed": design.seed,
        "sentinel": dict(design.sentinel or {}) if design.with_sentinel else None,
    }
    text = json.dumps(told, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


class _Sections:
    """Reads one key of the file after the other, and goes on when one is wrong."""

    def __init__(self, root: Node, trouble: Trouble, base: Path | None) -> None:
        self.root = root
        self.trouble = trouble
        self.reader = LevelReader(trouble, base)
        self.found: dict[str, Node] = {}

    def design(self) -> Design:
        for name, key, node in entries(self.root, self.trouble, "a study"):
            if name in KEYS:
                self.found[name] = node
            else:
                hint = f"Put {name} under fixed or factors" if name in NAMES else ""
                self.trouble.at(key, f"a study has no {name!r}", hint or nearest(name, KEYS))
        if not isinstance(self.root, MappingNode):
            self.trouble.raise_if_any()
        fixed = self.reader.places(self.found.get("fixed"), "fixed")
        varied = self.reader.places(self.found.get("factors"), "factors")
        factors = self._factors(varied, fixed)
        settings = self._model(varied, fixed) | self.reader.settings(fixed)
        self._check_together(settings)
        return Design(
            name=self._name(),
            fixed=settings,
            factors=tuple(factors),
            rules=tuple(self._rules()),
            repeats=self._whole("repeats", 1, least=1, most=MOST_REPEATS),
            seed=self._whole("seed", 0, least=0),
            choice=self._choice(),
            budget=self._budget(),
            **self._block_settings(),
            **self._oom_settings(),
        )

    def _said(self, key: str) -> Node | None:
        node = self.found.get(key)
        return None if node is None or is_nothing(node) else node

    def _name(self) -> str:
        node = self._said("name")
        text = node.value if isinstance(node, ScalarNode) else self.trouble.file.stem
        if (node is None or isinstance(node, ScalarNode)) and _NAME.fullmatch(text):
            return str(text)
        self.trouble.at(
            node or self.root,
            f"{text!r} cannot name a study: it names a folder",
            "Use letters, digits, spaces and . _ + -, at most 100 (name: ...)",
        )
        return ""

    def _factors(self, varied: Mapping[str, Node], fixed: Mapping[str, Node]) -> list[Factor]:
        node = self.found.get("factors")
        if node is None or is_nothing(node) or not node.value:
            self.trouble.at(
                node or self.root,
                "there are no factors: nothing would be varied",
                "For example, factors: {batch_size: [32, 128]}",
            )
        for name in varied.keys() & fixed.keys():
            line = fixed[name].start_mark.line + 1
            self.trouble.at(
                varied[name], f"{name} is fixed already, in line {line}", "Leave one of them out"
            )
        return [
            Factor(name, tuple(self.reader.levels(name, node))) for name, node in varied.items()
        ]

    def _model(self, varied: Mapping[str, Node], fixed: Mapping[str, Node]) -> dict[str, Level]:
        node = self._said("workload")
        if node is None and "model" not in {**varied, **fixed}:
            self.trouble.at(
                self.root, "there is no workload", "Say which: `workload: cnn`, or vary `model`"
            )
        found: dict[str, Level] = {}
        if node is not None:
            self.reader.level("model", node, found)
            if "model" in {**varied, **fixed}:
                self.trouble.at(
                    node,
                    "the model is said twice: by workload, and by model",
                    "Leave workload out where model is a factor",
                )
        return found

    def _check_together(self, fixed: Mapping[str, Level]) -> None:
        """What is fixed may be wrong by itself, whatever is varied."""
        if "model" not in fixed or self.trouble.found:
            return
        try:
            make_spec(fixed)
        except StepscopeError as error:
            what, hint = in_design_words(error.message), in_design_words(error.hint)
            self.trouble.at(self.found.get("fixed", self.root), what, hint)

    # Rules

    def _rules(self) -> list[Rule]:
        node = self._said("skip")
        if node is None:
            return []
        items = node.value if isinstance(node, SequenceNode) else [node]
        return [rule for item in items if (rule := self._rule(item)) is not None]

    def _rule(self, node: Node) -> Rule | None:
        when, because = node, ""
        if not isinstance(node, ScalarNode):
            parts = dict(self._parts(node, "a rule", ("when", "because")))
            if "when" in parts:
                when = parts["when"]
            elif isinstance(node, MappingNode):
                self.trouble.at(node, "a rule says when", "{when: workers > 2, because: ...}")
            because = self._text(parts["because"], "because") if "because" in parts else ""
            if when is node:
                return None
        if not (isinstance(when, ScalarNode) and when.tag.endswith(":str")):
            self.trouble.at(when, "this is no rule", "For example: workers > 2 * cpus")
            return None
        line = when.start_mark.line + 1
        try:
            return make_rule(when.value, line, because, NAMES)
        except BadRule as error:
            on_one_line = when.start_mark.line == when.end_mark.line
            shift = error.column + (not is_plain(when)) if on_one_line else 0
            self.trouble.at(when, error.what, error.hint, shift)
            return None

    def _parts(self, node: Node, what: str, known: tuple[str, ...]) -> list[tuple[str, Node]]:
        return [(name, value) for name, _, value in entries(node, self.trouble, what, known)]

    def _text(self, node: Node, what: str) -> str:
        if isinstance(node, ScalarNode):
            return str(node.value)
        self.trouble.at(node, f"{what} should be a text")
        return ""

    # Numbers, times and shares

    def _whole(
        self, what: str, usual: int, least: int, node: Node | None = None, most: int = 1 << 62
    ) -> int:
        node = node or self._said(what)
        if node is None or is_nothing(node):
            return usual
        value = self._value(node)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        if value is not None:
            bound = f" and at most {most:,}" if most < 1 << 62 else ""
            self.trouble.at(node, f"{what} should be a whole number, at least {least}{bound}")
        return usual

    def _value(self, node: Node) -> Any:
        try:
            return value_of(node)
        except NoValue as error:
            self.trouble.at(node, error.what, error.hint)
            return None

    def _parsed(self, node: Node, parse: Callable[[str], Any], hint: str) -> Any:
        """What is made of the text of a value, whatever YAML takes it for."""
        text = node.value if isinstance(node, ScalarNode) else ""
        try:
            if not text:
                raise ValueError(f"one value is wanted here, not {in_words(node)}")
            return parse(text)
        except ValueError as error:
            self.trouble.at(node, str(error), hint)
            return None

    def _choice(self) -> Choice:
        node = self._said("choose")
        if node is None or (isinstance(node, ScalarNode) and node.value == "full"):
            return Choice()
        if isinstance(node, ScalarNode | SequenceNode):
            self.trouble.at(node, "this is no choice of combinations", _CHOICES)
            return Choice()
        parts = dict(self._parts(node, "choose", ("fraction", "random")))
        if len(parts) > 1 or not node.value:
            self.trouble.at(node, "choose either a fraction or a random part", _CHOICES)
        if "random" in parts:
            return Choice(random=self._whole("random", 1, least=1, node=parts["random"]))
        if "fraction" not in parts:
            return Choice()
        share: Fraction | None = self._parsed(parts["fraction"], parse_share, SHARE_FORMS)
        if share == 0:
            self.trouble.at(parts["fraction"], "a fraction of 0 is nothing", SHARE_FORMS)
        return Choice() if share == 1 else Choice(fraction=share)

    def _budget(self) -> Budget:
        node = self._said("budget")
        if node is None:
            return Budget()
        if isinstance(node, ScalarNode):
            return Budget(self._duration(node))
        parts = dict(self._parts(node, "budget", ("time", "trials")))
        seconds = self._duration(parts["time"]) if "time" in parts else None
        trials = parts.get("trials")
        return Budget(seconds, self._whole("trials", 1, 1, trials) if trials else None)

    def _duration(self, node: Node) -> float | None:
        found: float | None = self._parsed(node, parse_duration, DURATION_FORMS)
        return found

    # Blocks and memory

    def _block_settings(self) -> dict[str, Any]:
        node = self._said("blocks")
        parts = dict(self._parts(node, "blocks", ("size", "reruns", "sentinel"))) if node else {}
        settings: dict[str, Any] = {
            "block": self._whole("size", 8, 1, parts["size"]) if "size" in parts else 8,
            "reruns": self._whole("reruns", 1, 0, parts["reruns"]) if "reruns" in parts else 1,
        }
        sentinel = parts.get("sentinel")
        if isinstance(sentinel, ScalarNode):
            settings["with_sentinel"] = False
            if self._value(sentinel) not in _OFF:
                self.trouble.at(
                    sentinel, "the sentinel is none, or settings", "sentinel: {batch_size: 32}"
                )
        elif sentinel is not None:
            places = self.reader.places(sentinel, "the sentinel")
            settings["sentinel"] = self.reader.settings(places)
        return settings

    def _oom_settings(self) -> dict[str, Any]:
        node = self._said("oom")
        parts = dict(self._parts(node, "oom", ("skip", "test"))) if node else {}
        settings: dict[str, Any] = {}
        if "skip" in parts:
            skip = self._value(parts["skip"])
            if isinstance(skip, bool):
                settings["skip_dominated"] = skip
            else:
                self.trouble.at(parts["skip"], "skip is true or false")
        if "test" in parts:
            share = self._parsed(parts["test"], parse_share, SHARE_FORMS)
            settings["tested_share"] = float(share or 0)
        return settings
