"""Reads the file of a study. All that is wrong with it is told at once, line by line."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import StepscopeError
from stepscope.studies.design import nodes, values
from stepscope.studies.design.records import Budget, Design
from stepscope.studies.design.rules import BadRule, Rule, make_rule
from stepscope.studies.trial_spec import NAMES, in_design_words, make_spec
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
_CHOICES = "Give full or {random: 40}"
_OFF = (None, False, "none")
_T = TypeVar("_T")


def read_design(path: Path, is_kept: bool = False) -> Design:
    """The study that a file describes; BadDesign lists what is wrong with it.

    Of one that was kept in the folder of its study, the files that it names may be elsewhere.
    """
    text, root, trouble = nodes.open_design(path)
    design = _Sections(root, trouble, None if is_kept else path.parent).design()
    trouble.raise_if_any()
    return dataclasses.replace(design, name=design.name or path.stem, file=path, text=text)


def design_digest(design: Design) -> str:
    """The same for the same trials: whatever the spacing, the comments, the budget, the repeats."""
    told = {
        "fixed": dict(design.fixed),
        "factors": [[factor.name, list(factor.levels)] for factor in design.factors],
        "rules": sorted(ast.unparse(ast.parse(rule.plain, mode="eval")) for rule in design.rules),
        "sample": design.sample,
        "seed": design.seed,
        "sentinel": dict(design.reference or {}) if design.with_reference else None,
    }
    text = json.dumps(told, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


class _Sections:
    """Reads one key of the file after the other, and goes on when one is wrong."""

    def __init__(self, root: Node, trouble: nodes.Trouble, base: Path | None) -> None:
        """`base` is where the user's own files are looked for; a kept design has none."""
        self.root = root
        self.trouble = trouble
        self.is_kept = base is None
        self.reader = values.LevelReader(trouble, base)
        self.found: dict[str, Node] = {}

    def design(self) -> Design:
        for name, key, node in nodes.entries(self.root, self.trouble, "a study"):
            if name in KEYS:
                self.found[name] = node
            else:
                hint = f"Put {name} under fixed or factors" if name in NAMES else ""
                self.trouble.at(key, f"a study has no {name!r}", hint or nearest(name, KEYS))
        if not isinstance(self.root, MappingNode):
            self.trouble.raise_if_any()
        fixed, factors = self._settings()
        rules = self._said("skip")
        items = rules.value if isinstance(rules, SequenceNode) else [rules] if rules else []
        return Design(
            name=self._name(),
            fixed=fixed,
            factors=factors,
            rules=tuple(rule for item in items if (rule := self._rule(item))),
            repeats=self._whole(self._said("repeats"), "repeats", 1, 1, MOST_REPEATS),
            seed=self._whole(self._said("seed"), "seed", 0, 0),
            sample=self._sample(),
            budget=self._budget(),
            **self._blocks(),
            **self._oom(),
        )

    def _said(self, key: str) -> Node | None:
        node = self.found.get(key)
        return None if node is None or nodes.is_nothing(node) else node

    def _parts(self, node: Node | None, what: str, known: tuple[str, ...]) -> dict[str, Node]:
        named = nodes.entries(node, self.trouble, what, known) if node else ()
        return {name: value for name, _, value in named}

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

    def _settings(self) -> tuple[dict[str, Level], tuple[Factor, ...]]:
        """What all trials have, and what is varied; the model is one or the other."""
        at = self.trouble.at
        fixed = self.reader.places(self.found.get("fixed"), "fixed")
        varied = self.reader.places(self.found.get("factors"), "factors")
        node = self.found.get("factors")
        if node is None or nodes.is_nothing(node) or not node.value:
            hint = "For example, factors: {batch_size: [32, 128]}"
            at(node or self.root, "there are no factors: nothing would be varied", hint)
        for name in varied.keys() & fixed.keys():
            line = fixed[name].start_mark.line + 1
            at(varied[name], f"{name} is fixed already, in line {line}", "Leave one of them out")
        factors = tuple(
            Factor(name, tuple(self.reader.levels(name, node))) for name, node in varied.items()
        )
        workload, has_model = self._said("workload"), "model" in {**varied, **fixed}
        settings: dict[str, Level] = {}
        if workload is not None:
            self.reader.level("model", workload, settings)
            if has_model:
                what = "the model is said twice: by workload, and by model"
                at(workload, what, "Leave workload out where model is a factor")
        elif not has_model:
            at(self.root, "there is no workload", "Say which: `workload: cnn`, or vary `model`")
        settings |= self.reader.settings(fixed)
        if "model" in settings and not self.trouble.found:
            try:  # what is fixed may be wrong by itself, whatever is varied
                make_spec(settings)
            except StepscopeError as error:
                what, hint = in_design_words(error.message), in_design_words(error.hint)
                at(self.found.get("fixed", self.root), what, hint)
        return settings, factors

    def _rule(self, node: Node) -> Rule | None:
        when: Node | None = node
        because = ""
        if not isinstance(node, ScalarNode):
            parts = self._parts(node, "a rule", ("when", "because"))
            when = parts.get("when")
            if when is None and isinstance(node, MappingNode):
                self.trouble.at(node, "a rule says when", "{when: workers > 2, because: ...}")
            reason = parts.get("because")
            if isinstance(reason, ScalarNode):
                because = str(reason.value)
            elif reason is not None:
                self.trouble.at(reason, "because should be a text")
            if when is None:
                return None
        if not (isinstance(when, ScalarNode) and when.tag.endswith(":str")):
            self.trouble.at(when or node, "this is no rule", "For example: workers > 2 * cpus")
            return None
        try:
            return make_rule(when.value, when.start_mark.line + 1, because)
        except BadRule as error:
            on_one_line = when.start_mark.line == when.end_mark.line
            shift = error.column + (not nodes.is_plain(when)) if on_one_line else 0
            self.trouble.at(when, error.what, error.hint, shift)
            return None

    def _whole(
        self, node: Node | None, what: str, default: int, least: int, most: int = 1 << 62
    ) -> int:
        value = None if node is None or nodes.is_nothing(node) else self._value(node)
        if value is None or node is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        bound = f" and at most {most:,}" if most < 1 << 62 else ""
        self.trouble.at(node, f"{what} should be a whole number, at least {least}{bound}")
        return default

    def _value(self, node: Node) -> Any:
        try:
            return nodes.value_of(node)
        except nodes.NoValue as error:
            self.trouble.at(node, error.what, error.hint)
            return None

    def _parsed(self, node: Node | None, parse: Callable[[str], _T], hint: str) -> _T | None:
        """What is made of the text of a value, whatever YAML takes it for."""
        if node is None:
            return None
        try:
            if not (isinstance(node, ScalarNode) and node.value):
                raise ValueError(f"one value is wanted here, not {nodes.in_words(node)}")
            return parse(node.value)
        except ValueError as error:
            self.trouble.at(node, str(error), hint)
            return None

    def _sample(self) -> int | None:
        node = self._said("choose")
        if node is None or (isinstance(node, ScalarNode) and node.value == "full"):
            return None
        if isinstance(node, ScalarNode | SequenceNode):
            self.trouble.at(node, "this is no choice of combinations", _CHOICES)
            return None
        if not node.value:
            self.trouble.at(node, "choose says nothing", _CHOICES)
        parts = self._parts(node, "choose", ("random", "fraction"))
        if "fraction" in parts and not self.is_kept:
            hint = "Draw that many combinations at random: {random: 40}"
            self.trouble.at(parts["fraction"], "fractions of a design are not supported", hint)
        return self._whole(parts["random"], "random", 1, 1) if "random" in parts else None

    def _budget(self) -> Budget:
        node = self._said("budget")
        if isinstance(node, ScalarNode):
            return Budget(self._parsed(node, values.parse_duration, values.DURATION_FORMS))
        parts = self._parts(node, "budget", ("time", "trials"))
        seconds = self._parsed(parts.get("time"), values.parse_duration, values.DURATION_FORMS)
        trials = self._whole(parts["trials"], "trials", 1, 1) if "trials" in parts else None
        return Budget(seconds, trials)

    def _blocks(self) -> dict[str, Any]:
        parts = self._parts(self._said("blocks"), "blocks", ("size", "reruns", "sentinel"))
        settings: dict[str, Any] = {
            "block": self._whole(parts.get("size"), "size", 8, 1),
            "reruns": self._whole(parts.get("reruns"), "reruns", 1, 0),
        }
        reference = parts.get("sentinel")
        if isinstance(reference, ScalarNode):
            settings["with_reference"] = False
            if self._value(reference) not in _OFF:
                hint = "sentinel: {batch_size: 32}"
                self.trouble.at(reference, "the sentinel is none, or settings", hint)
        elif reference is not None:
            places = self.reader.places(reference, "the sentinel")
            settings["reference"] = self.reader.settings(places)
        return settings

    def _oom(self) -> dict[str, Any]:
        parts = self._parts(self._said("oom"), "oom", ("skip", "test"))
        settings: dict[str, Any] = {}
        if "skip" in parts:
            settings["skip_dominated"] = self._value(parts["skip"])
            if not isinstance(settings["skip_dominated"], bool):
                self.trouble.at(parts["skip"], "skip is true or false")
        if "test" in parts:
            share = self._parsed(parts["test"], values.parse_share, values.SHARE_FORMS)
            settings["tested_share"] = float(share or 0)
        return settings
