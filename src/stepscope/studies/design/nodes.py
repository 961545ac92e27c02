"""YAML with places: every value knows its line, and what is wrong is told with it.

PyYAML takes the last of two equal keys without a word, and reads `1e-3` as text, `010` as 8 and
`1:30` as 90. So its nodes are read here rather than its values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode
from yaml.constructor import SafeConstructor

from stepscope.errors import BadDesign
from stepscope.workloads.spec import nearest

MOST_BYTES = 256 * 1024
MOST_TOLD = 10
_SHOWN_WIDTH = 96
_MERGE = "tag:yaml.org,2002:merge"
_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_HINTS = (
    (r"'\\t'", "Indent with spaces, not with tabs"),
    (r"mapping values are not allowed", "Look at the indentation; a text with `: ` needs quotes"),
    (r"expected a single document", "A file is one study: leave out the second ---"),
    (r"could not find expected ':'", "After a name comes a colon and a space"),
    (r"undefined alias|alias", "A text that begins with * needs quotes"),
    (
        r"expected <block end>",
        "Look at the indentation; a text that begins with a quote needs others around it",
    ),
    (r"special characters", "Save it as plain text, in UTF-8"),
    (r"cannot start any token", "Put the text in quotes"),
    (r"expected ',' or", "A text with brackets, within brackets, needs quotes"),
)


@dataclass
class Trouble:
    """All that is wrong with a file, each with its place: people want to know it at once."""

    file: Path
    lines: list[str] = field(default_factory=list)
    found: dict[tuple[int, int, str], str] = field(default_factory=dict)

    def at(self, node: Node, what: str, hint: str = "", shift: int = 0) -> None:
        mark = node.start_mark
        self.add(mark.line, mark.column + shift, what, hint)

    def add(self, line: int, column: int, what: str, hint: str = "") -> None:
        """Counted from 0. A hint of several lines comes below what is shown of the line."""
        short, long = ("", f"\n{hint}") if "\n" in hint else (f". {hint}" if hint else "", "")
        shown = ""
        if 0 <= line < len(self.lines) and self.lines[line].strip():
            # The line, with a caret beneath, as compilers do.
            text = "".join(c if c.isprintable() or c == "\t" else "?" for c in self.lines[line])
            end = min(column, len(text))
            start = max(0, end - _SHOWN_WIDTH * 3 // 4)
            before = "".join("\t" if c == "\t" else " " for c in text[start:end])
            shown = f"\n    {text[start : start + _SHOWN_WIDTH].rstrip()}\n    {before}^"
        self.found[line, column, what] = f"{self.file}:{line + 1}: {what}{short}{shown}{long}"

    def raise_if_any(self) -> None:
        if not self.found:
            return
        told = [text for _, text in sorted(self.found.items())]
        more = len(told) - MOST_TOLD
        raise BadDesign(
            "\n".join(told[:MOST_TOLD]) + (f"\nand {more} more like these" if more > 0 else "")
        )


def open_design(path: Path) -> tuple[str, Node, Trouble]:
    """The text of a file and its root; BadDesign where it is no YAML at all."""
    text = _text_of(path)
    trouble = Trouble(path, _BREAK.split(text))
    root = None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        line, column, what = 0, 0, ""
        if isinstance(error, yaml.MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            what = (error.problem or error.context or "").rstrip(".")
            line, column = (mark.line, mark.column) if mark else (0, 0)
        elif isinstance(error, yaml.reader.ReaderError):
            before = _BREAK.split(text[: error.position])
            line, column, what = len(before) - 1, len(before[-1]), error.reason
        hint = next((hint for words, hint in _HINTS if re.search(words, str(error))), "")
        trouble.add(line, column, f"this is no YAML: {what}", hint)
    except RecursionError:
        trouble.add(0, 0, "this is nested too deeply")
    except (ValueError, IndexError) as error:  # escapes that PyYAML does not check
        trouble.add(0, 0, f"this is no YAML: {error}")
    trouble.raise_if_any()
    if root is None:
        raise BadDesign(f"{path} is empty", "It needs at least a workload and factors")
    return text, root, trouble


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except IsADirectoryError:
        raise BadDesign(f"{path} is a folder", "Give the YAML file of a study") from None
    except FileNotFoundError:
        others = [each.name for end in ("yaml", "yml") for each in path.parent.glob(f"*.{end}")]
        hint = nearest(path.name, others) if others else f"You are in {Path.cwd()}"
        raise BadDesign(f"There is no file {path}", hint) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadDesign(f"{path} cannot be read: {why}") from None
    if len(data) > MOST_BYTES:
        raise BadDesign(
            f"{path} is larger than {MOST_BYTES // 1024} KiB", "Is it the file of a study?"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(_BREAK.split(data[: error.start].decode("utf-8", "replace")))
        raise BadDesign(f"{path}:{line}: this is not UTF-8", "Save it as UTF-8") from None


def entries(
    node: Node, trouble: Trouble, what: str, known: Collection[str] | None = None
) -> Iterator[tuple[str, Node, Node]]:
    """The names of a mapping with their nodes; what is no mapping, known or unique is told."""
    if not isinstance(node, MappingNode):
        if not is_nothing(node):
            trouble.at(node, f"{what} should be names with values, not {in_words(node)}")
        return
    seen: dict[str, int] = {}
    own = [(key, value) for key, value in node.value if key.tag != _MERGE]
    merged: list[tuple[Node, Node]] = []  # by `<<: *anchor`, one level deep
    for key, value in node.value:
        if key.tag == _MERGE:
            for source in value.value if isinstance(value, SequenceNode) else [value]:
                merged += source.value if isinstance(source, MappingNode) else []
    for key, value in (*own, *merged):
        name = str(key.value) if isinstance(key, ScalarNode) else ""
        if not name:
            trouble.at(key, f"in {what}, this is no name")
        elif name in seen:
            if (key, value) in own:
                trouble.at(key, f"{name} is there twice, first in line {seen[name]}")
        elif known is not None and name not in known:
            trouble.at(key, f"{what} has no {name!r}", nearest(name, known))
        else:
            seen[name] = key.start_mark.line + 1
            yield name, key, value


def in_words(node: Node) -> str:
    """What a node is, for people."""
    if isinstance(node, MappingNode):
        return "names with values"
    return "a list" if isinstance(node, SequenceNode) else "one value"


def is_nothing(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.tag.endswith(":null")


def is_plain(node: ScalarNode) -> bool:
    """Whether it stands without quotes."""
    return node.style is None


class NoValue(ValueError):
    """What YAML makes of a scalar is not what was meant; says why."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


def value_of(node: Node, is_text: bool = False) -> Any:
    """A number, text, true, false or nothing, as people mean it; NoValue where that is not sure.

    Where `is_text` is meant, 1e3 and 08 are what YAML says: text.
    """
    if not isinstance(node, ScalarNode):
        raise NoValue(f"one value is wanted here, not {in_words(node)}")
    raw, kind = node.value, node.tag.rpartition(":")[2]
    if is_text and kind == "str":
        return raw
    if kind == "int" and ":" in raw:
        raise NoValue(
            f"YAML reads {raw} as {_built(node)}", "Write the number, or put it in quotes"
        )
    if is_plain(node) and _OCTAL.fullmatch(raw):
        raise NoValue(
            f"a number that begins with 0 is octal, or text, for YAML: {raw}",
            f"Write {raw.lstrip('+-0_') or 0}",
        )
    if kind == "str" and is_plain(node) and _EXPONENT.fullmatch(raw):
        return float(raw)
    if kind in ("int", "float", "bool", "null", "str"):
        return _built(node)
    if kind == "timestamp":
        raise NoValue(f"YAML reads {raw} as a date", "Put it in quotes if it is text")
    raise NoValue(f"{raw[:40]!r} is of a kind that is not known here")


def _built(node: ScalarNode) -> Any:
    try:
        return SafeConstructor().construct_object(node)
    except (ValueError, yaml.YAMLError, OverflowError, KeyError, IndexError):
        raise NoValue(f"{node.value[:40]!r} cannot be read") from None
