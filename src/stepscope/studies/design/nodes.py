"""YAML nodes with their positions, so that every error names a line and shows it.

The nodes are read instead of PyYAML's values, because PyYAML keeps the last of two equal keys
without a warning, and reads `1e-3` as text, `010` as 8 and `1:30` as 90.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode
from yaml.constructor import SafeConstructor

from stepscope.errors import DesignError
from stepscope.runs.files import LINES_LIMIT, UnsafeFile, read_regular
from stepscope.workloads.spec import close_names, did_you_mean, nearest

MAX_BYTES = 256 * 1024
MAX_SHOWN = 10
_MAX_PROBLEMS = 1000
_EXCERPT_WIDTH = 96
_MAX_DIGITS = 100
_MERGE = "tag:yaml.org,2002:merge"
_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_HINTS = (
    (r"'\\t'", "Indent with spaces, not tabs"),
    (r"mapping values are not allowed", "Check the indentation; text with `: ` needs quotes"),
    (r"expected a single document", "A file contains one study: remove the second ---"),
    (r"could not find expected ':'", "Put a colon and a space after each name"),
    (r"undefined alias|alias", "Text that starts with * needs quotes"),
    (
        r"expected <block end>",
        "Check the indentation; text that starts with a quotation mark must be in the other kind "
        "of quotes",
    ),
    (r"special characters", "Save the file as plain text in UTF-8"),
    (r"cannot start any token", "Put the text in quotes"),
    (r"expected ',' or .*<stream end>", "Close this bracket"),
    (r"expected ',' or", "Inside brackets, put text that contains brackets in quotes"),
)
_SCALARS = {
    "int": "a number",
    "float": "a number",
    "bool": "a boolean",
    "null": "null",
    "str": "text",
}


@dataclass
class Problems:
    """All problems of a file with their positions, so that they can be reported together."""

    file: Path
    lines: list[str] = field(default_factory=list)
    found: dict[tuple[int, int, str], str] = field(default_factory=dict)

    def at(self, node: Node, message: str, hint: str = "", shift: int = 0) -> None:
        mark = node.start_mark
        self.add(mark.line, mark.column + shift, message, hint)

    def add(self, line: int, column: int, message: str, hint: str = "") -> None:
        """Add a problem; `line` and `column` count from 0.

        A hint of several lines is placed below the excerpt.
        """
        if len(self.found) >= _MAX_PROBLEMS:
            return
        short, long = ("", f"\n{hint}") if "\n" in hint else (f". {hint}" if hint else "", "")
        excerpt = ""
        if 0 <= line < len(self.lines) and self.lines[line].strip():
            end = min(column, len(self.lines[line]))
            start = max(0, end - _EXCERPT_WIDTH * 3 // 4)
            shown = self.lines[line][start : start + _EXCERPT_WIDTH]
            text = "".join(c if c.isprintable() or c == "\t" else "?" for c in shown)
            before = "".join("\t" if c == "\t" else " " for c in text[: end - start])
            excerpt = f"\n    {text.rstrip()}\n    {before}^"
        where = f"{self.file}:{line + 1}"
        self.found[line, column, message] = f"{where}: {message}{short}{excerpt}{long}"

    def raise_if_any(self) -> None:
        if not self.found:
            return
        texts = [text for _, text in sorted(self.found.items())]
        more = len(texts) - MAX_SHOWN
        if more > 0:
            texts[MAX_SHOWN:] = [f"and {more} more error{'s' if more > 1 else ''}"]
        raise DesignError("\n".join(texts))


def open_design(path: Path, is_kept: bool) -> tuple[str, Node, Problems]:
    """Return the text of a file and its root node; raise DesignError if it is not YAML. With
    `is_kept`, it is the copy in a study folder, where links are not followed."""
    text = _read_text(path, is_kept)
    problems = Problems(path, _BREAK.split(text))
    root = None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        line, column, what = 0, 0, ""
        if isinstance(error, yaml.MarkedYAMLError):
            is_at_end = "<stream end>" in (error.problem or "")  # a bracket that is not closed
            mark = (error.context_mark if is_at_end else None) or error.problem_mark
            what = (error.problem or error.context or "").rstrip(".")
            line, column = (mark.line, mark.column) if mark else (0, 0)
        elif isinstance(error, yaml.reader.ReaderError):
            before = _BREAK.split(text[: error.position])
            line, column, what = len(before) - 1, len(before[-1]), error.reason
        hint = next((hint for pattern, hint in _HINTS if re.search(pattern, str(error))), "")
        problems.add(line, column, f"YAML syntax error: {what}", hint)
    except RecursionError:
        problems.add(0, 0, "The YAML is nested too deeply")
    except (ValueError, IndexError) as error:  # escapes that PyYAML does not check
        problems.add(0, 0, f"YAML syntax error: {error}")
    problems.raise_if_any()
    if root is None:
        raise DesignError(f"{path} is empty", "A design needs at least `workload` and `factors`")
    return text, root, problems


def _read_text(path: Path, is_kept: bool) -> str:
    if os.path.isdir(path):
        raise DesignError(f"{path} is a folder", "Pass the YAML file of a study")
    try:
        file = path if is_kept else Path(os.path.realpath(path))
        data = read_regular(file, LINES_LIMIT)
    except FileNotFoundError:
        others = [each.name for end in ("yaml", "yml") for each in path.parent.glob(f"*.{end}")]
        close = close_names(path.stem, [Path(other).stem for other in others])
        hint = f"The current folder is {Path.cwd()}"
        if close:
            hint = did_you_mean([other for other in others if Path(other).stem in close])
        raise DesignError(f"No such file: {path}", hint) from None
    except UnsafeFile as error:
        raise DesignError(f"Cannot read the design: {error.message}", error.hint) from None
    if len(data) > MAX_BYTES:
        raise DesignError(
            f"{path} is larger than {MAX_BYTES // 1024} KiB", "Pass the YAML file of a study"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(_BREAK.split(data[: error.start].decode("utf-8", "replace")))
        raise DesignError(f"{path}:{line}: Invalid UTF-8", "Save the file as UTF-8") from None


def entries(
    node: Node, problems: Problems, what: str, known: Collection[str] | None = None
) -> Iterator[tuple[str, Node, Node]]:
    """Yield the entries of a mapping as name, key node and value node.

    Invalid, unknown and duplicate keys are reported as problems.
    """
    if not isinstance(node, MappingNode):
        if not is_null(node):
            problems.at(node, f"Expected a mapping for {what}, found {node_type(node)}")
        return
    seen: dict[str, int] = {}
    own = [(key, value) for key, value in node.value if key.tag != _MERGE]
    merged: list[tuple[Node, Node]] = []  # from `<<: *anchor`, one level deep
    for key, value in node.value:
        if key.tag == _MERGE:
            for source in value.value if isinstance(value, SequenceNode) else [value]:
                merged += source.value if isinstance(source, MappingNode) else []
    for key, value in (*own, *merged):
        name = str(key.value) if isinstance(key, ScalarNode) else ""
        if not name:
            problems.at(key, f"Invalid key in {what}: expected a name")
        elif name in seen:
            if (key, value) in own:
                problems.at(key, f"Duplicate key {name!r}, first set on line {seen[name]}")
        elif known is not None and name not in known:
            problems.at(key, f"Unknown key {name!r} in {what}", nearest(name, known))
        else:
            seen[name] = key.start_mark.line + 1
            yield name, key, value


def node_type(node: Node) -> str:
    """Return the type of a node as a noun phrase: `a list`, `a number`."""
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list"
    return _SCALARS.get(node.tag.rpartition(":")[2], "a single value")


def is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.tag.endswith(":null")


def is_plain(node: ScalarNode) -> bool:
    """Return whether a scalar is written without quotes."""
    return node.style is None


class InvalidValue(ValueError):
    """A scalar that YAML reads in another way than it looks, or cannot read."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def value_of(node: Node, is_text: bool = False) -> Any:
    """Return the number, text, boolean or None of a scalar; raise InvalidValue if ambiguous.

    With `is_text`, text that looks like a number (1e3, 08) stays text.
    """
    if not isinstance(node, ScalarNode):
        raise InvalidValue(f"Expected a single value, found {node_type(node)}")
    raw, kind = node.value, node.tag.rpartition(":")[2]
    if is_text and kind == "str":
        return raw
    if kind in ("int", "float") and len(raw) > _MAX_DIGITS:
        raise InvalidValue(f"Invalid value {raw[:40]!r}")
    if kind == "int" and ":" in raw:
        raise InvalidValue(
            f"YAML reads {raw} as {_construct(node)}", "Write the number, or put it in quotes"
        )
    if is_plain(node) and _OCTAL.fullmatch(raw):
        raise InvalidValue(
            f"YAML reads {raw} as an octal number or as text",
            f"Write {raw.lstrip('+-0_') or 0}",
        )
    if kind == "str" and is_plain(node) and _EXPONENT.fullmatch(raw):
        return float(raw)
    if kind in _SCALARS:
        return _construct(node)
    if kind == "timestamp":
        raise InvalidValue(f"YAML reads {raw} as a date", "Put it in quotes if it is text")
    raise InvalidValue(f"Unsupported YAML type for {raw[:40]!r}")


def _construct(node: ScalarNode) -> Any:
    try:
        return SafeConstructor().construct_object(node)
    except (ValueError, yaml.YAMLError, OverflowError, KeyError, IndexError):
        raise InvalidValue(f"Invalid value {node.value[:40]!r}") from None
