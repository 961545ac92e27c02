"""Collect the keys of JSON objects with their meaning from the source.

A key is a field of a record or a key of a dict literal. Its meaning is the comment at the end of
its line or, for a field, the docstring below it. `docs/generate.py` writes them to docs/json.md.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

Rows = dict[str, str]
"""Meaning by key."""


def field_meanings(record: type) -> Rows:
    """The fields of a record; an empty text where the source has no meaning."""
    found: Rows = {}
    for base in reversed([each for each in record.__mro__ if each is not object]):
        tree, comments = _parse(base)
        body = tree.body[0].body  # type: ignore[attr-defined]
        for statement, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                name = ast.unparse(statement.target)
                lines = range(statement.lineno, (statement.end_lineno or 0) + 1)
                comment = " ".join(comments[line] for line in lines if line in comments)
                found[name] = comment or _docstring(below)
    return {field.name: found[field.name] for field in fields(record)}


def record_keys(
    record: type,
    renamed: Mapping[str, str] | None = None,
    more: Rows | None = None,
) -> Rows:
    """The keys of a record in JSON. Fields with an empty new name are left out."""
    names = renamed or {}
    keys = {
        names.get(name, name): meaning
        for name, meaning in field_meanings(record).items()
        if names.get(name, name)
    }
    return _complete({**keys, **(more or {})}, record.__name__)


def literal_keys(
    function: Callable[..., Any],
    records: Iterable[type] = (),
    expand: Mapping[str, Rows] | None = None,
) -> Rows:
    """The keys of the dict literals of a function, in the order of the source.

    `records` have the meaning of keys without a comment. `expand` has the keys of `**` expressions.
    """
    tree, comments = _parse(function)
    known: Rows = {}
    for record in records:
        known = {**field_meanings(record), **known}
    expanded, found = expand or {}, dict[str, str]()

    def can_expand(literal: ast.Dict) -> bool:
        """Whether a dict has several lines and all keys are known."""
        if literal.lineno == literal.end_lineno:
            return False  # the comment of the outer key says it all
        pairs = zip(literal.keys, literal.values, strict=True)
        return all(ast.unparse(value) in expanded for key, value in pairs if key is None)

    def visit(literal: ast.Dict, prefix: str) -> None:
        for key, value in zip(literal.keys, literal.values, strict=True):
            if key is None:
                rows = expanded[ast.unparse(value)]
                found.update({f"{prefix}{name}": meaning for name, meaning in rows.items()})
            elif isinstance(key, ast.Constant):
                name = f"{prefix}{key.value}"
                lines = (key.lineno, value.end_lineno or 0)
                comment = next((comments[line] for line in lines if line in comments), "")
                found[name] = comment or known.get(key.value, "")
                source = variables.get(ast.unparse(value), value)
                is_list = isinstance(source, ast.List | ast.ListComp)
                inner = source.elt if isinstance(source, ast.ListComp) else source
                if isinstance(inner, ast.Dict) and can_expand(inner):
                    visit(inner, f"{name}{'[]' if is_list else ''}.")

    variables: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Name | ast.Constant):
            variables[ast.unparse(node.targets[0])] = node.value
    literals = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    visit(max(literals, key=lambda node: len(node.keys)), "")
    return _complete(found, function.__name__)


def _complete(rows: Rows, name: str) -> Rows:
    unknown = [key for key, meaning in rows.items() if not meaning]
    if unknown:
        raise ValueError(f"{name}: no comment says what these keys mean: {', '.join(unknown)}")
    return {key: meaning[0].upper() + meaning[1:].rstrip(".") for key, meaning in rows.items()}


def _parse(thing: Any) -> tuple[ast.Module, dict[int, str]]:
    """The syntax tree of a class or function, and its comments by line."""
    source = textwrap.dedent(inspect.getsource(thing))
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# fmt"):
            above = token.line.lstrip().startswith("#")  # a line of its own, for the next line
            comments[token.start[0] + above] = token.string.lstrip("# ")
    return ast.parse(source), comments


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""
