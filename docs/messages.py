"""Collect every text that a user can see from the source: string literals, command help, templates.

`docs/generate.py` writes them to docs/messages.md, so that the language of the product can be read
and reviewed in one place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "stepscope"

_WORDS = re.compile(r"[A-Za-z]{2,}[,;:.)]* +[A-Za-z(`'\"{\[]|^[A-Z][a-z]{2,}")
_CODE = re.compile(r"\(\?[:P<]|^<(svg|text|line|path|rect|circle)|^import |^(bold|dim) ")
_TAG = re.compile(r"<[^>]*>|\{[{%#].*?[}%#]\}", re.DOTALL)


@dataclass(frozen=True)
class Message:
    file: str
    line: int
    text: str  # with {placeholders}


def collect(source: Path = SOURCE) -> list[Message]:
    """Every message template of the package, by file and line; each text once per file."""
    found = []
    for path in sorted(source.rglob("*")):
        if path.name == "masking.py":  # lists of words, no messages
            continue
        if path.suffix == ".py":
            texts = _python_texts(ast.parse(path.read_text(encoding="utf-8")))
        elif path.suffix == ".html":
            texts = _page_texts(path.read_text(encoding="utf-8"))
        else:
            continue
        name, seen = path.relative_to(source).as_posix(), set()
        for line, text in texts:
            plain = " ".join(text.split())
            if _is_message(plain) and plain not in seen:
                seen.add(plain)
                found.append(Message(name, line, plain))
    return found


def _is_message(text: str) -> bool:
    return bool(_WORDS.search(text)) and not _CODE.search(text)


def _python_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String literals in the order of the source, without docstrings; and the help of commands."""
    docstrings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }

    def walk(node: ast.AST) -> Iterator[tuple[int, str]]:
        if node in docstrings or _is_code(node):
            return
        if isinstance(node, ast.FunctionDef) and _is_command(node):
            yield node.lineno, ast.get_docstring(node) or ""
        text = template(node)
        if text is None:
            for child in ast.iter_child_nodes(node):
                yield from walk(child)
            return
        yield node.lineno, text  # type: ignore[attr-defined]
        for part in ast.walk(node):  # texts inside the placeholders
            if isinstance(part, ast.FormattedValue):
                yield from walk(part.value)

    yield from walk(tree)


def _is_code(node: ast.AST) -> bool:
    """A regular expression, or a list of words to split."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    module, name = node.func.value, node.func.attr
    return (isinstance(module, ast.Name) and module.id == "re") or (
        isinstance(module, ast.Constant) and name == "split"
    )


def _is_command(function: ast.FunctionDef) -> bool:
    """Whether typer makes a command of it: it has annotated options."""
    return any("typer." in ast.unparse(each) for each in function.args.defaults) or any(
        argument.annotation is not None and "typer." in ast.unparse(argument.annotation)
        for argument in function.args.args
    )


def template(node: ast.AST) -> str | None:
    """The text of a literal, an f-string or a sum of them; None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else _placeholder(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        if left is None and right is None:
            return None
        return (_placeholder(node.left) if left is None else left) + (
            _placeholder(node.right) if right is None else right
        )
    return None


def _placeholder(node: ast.AST) -> str:
    return f"{{{ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)}}}"


def _page_texts(page: str) -> Iterator[tuple[int, str]]:
    """The texts between the tags of a template."""
    plain = _TAG.sub(lambda tag: re.sub(r"[^\n]", "\0", tag[0]), page)
    for match in re.finditer(r"[^\0\n]+", plain):
        yield page.count("\n", 0, match.start()) + 1, match[0]
