"""The function that a user's file lacks, written for them from what is in the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPEN = "..."
"""Stands where only the user knows what to put."""
_BRING_A_LOSS = {"lightning", "pytorch_lightning", "transformers"}
"""A LightningModule has its training_step, a model of transformers looks at the labels itself."""
_NO_MAKER = re.compile(r"_?(train|fit|eval|test|valid|save|check|main|run|plot)")


@dataclass(frozen=True)
class _Wanted:
    """By what a thing is known: the name of it, or of what it derives from."""

    kinds: tuple[str, ...]
    name: re.Pattern[str]

    def is_kind(self, node: ast.expr) -> bool:
        """Whether a base class or an annotation is one of the kinds, say `Dataset[Any]`."""
        written = ast.unparse(node).partition("[")[0].strip("'\"")
        return written.endswith(self.kinds) and not written.endswith("DataModule")


_MODEL = _Wanted(("Module", "PreTrainedModel"), re.compile(r"model|(^|_)[a-z]{0,3}n(n|et)\d*(_|$)"))
_DATA = _Wanted(
    ("Dataset", "ImageFolder", "DataLoader"),
    re.compile(r"data(set)?s?(_|$)|(^|_)(images|samples|loader|trainset)(_|$)"),
)


def skeleton_of(tree: ast.Module, function: str | None, trains_at: int | None = None) -> str:
    """Source of a function with that name, then of a place for what trains when imported."""
    parts = [_function(tree, function)] if function else []
    if trains_at is not None:
        parts.append(
            f'if __name__ == "__main__":\n    ...  # all that trains, as line {trains_at} does\n'
        )
    return "\n\n".join(parts)


def _function(tree: ast.Module, name: str) -> str:
    model = _found(tree, _MODEL) or f"{_OPEN},  # a torch.nn.Module"
    data = _found(tree, _DATA) or f"{_OPEN},  # a Dataset, not yet in batches"
    imported, loss = "", ""
    if not _imported(tree) & _BRING_A_LOSS:
        imported = "    from torch.nn.functional import cross_entropy\n\n"
        loss = '        "loss": cross_entropy,  # of the model\'s output and the target\n'
    return (
        f"def {name}():\n"
        f"{imported}"
        "    return {\n"
        f'        "model": {model}\n'
        f"{loss}"
        f'        "data": {data}\n'
        "    }\n"
    )


def _imported(tree: ast.Module) -> set[str]:
    """The packages that a file uses."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def _found(tree: ast.Module, wanted: _Wanted) -> str:
    """What gives the wanted: a variable, else a function, else the class that comes last."""
    last_class = list(_classes(tree, wanted))[-1:]
    found = [*_variables(tree, wanted), *_functions(tree, wanted), *last_class]
    return f"{found[0]}," if found else ""


def _variables(tree: ast.Module, wanted: _Wanted) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for target in node.targets:
                if isinstance(target, ast.Name) and wanted.name.search(target.id.lower()):
                    yield target.id


def _functions(tree: ast.Module, wanted: _Wanted) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _makes(node, wanted):
            yield _call(node.name, node.args)


def _makes(node: ast.FunctionDef, wanted: _Wanted) -> bool:
    if node.returns is not None:
        return wanted.is_kind(node.returns)
    gives = any(isinstance(part, ast.Return) and part.value for part in ast.walk(node))
    return gives and bool(wanted.name.search(node.name)) and not _NO_MAKER.match(node.name)


def _classes(tree: ast.Module, wanted: _Wanted) -> Iterator[str]:
    known: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            wanted.is_kind(base) or ast.unparse(base) in known for base in node.bases
        ):
            known.add(node.name)
            yield _call(node.name, _made_with(node))


def _made_with(node: ast.ClassDef) -> ast.arguments | None:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return part.args
    return None


def _call(name: str, arguments: ast.arguments | None) -> str:
    """A call with a place for everything that has no default."""
    if arguments is None:
        return f"{name}()"
    positional = [*arguments.posonlyargs, *arguments.args]
    needed = positional[: len(positional) - len(arguments.defaults)]
    needed += [
        argument
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    filled = (f"{argument.arg}={_OPEN}" for argument in needed if argument.arg != "self")
    return f"{name}({', '.join(filled)})"
