"""The parts of a training that are in a user's file, as code that a function in it could return.

Best is what the training in the file uses: the model whose parameters the optimizer gets, the data
set of the loader that is looped over. Names that a module has are taken as they are; those that
only a function has, where the training stands in one, by what they are made with.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stepscope.workloads.scopes import (
    Resolver,
    Scope,
    Unknown,
    argument_of,
    called,
    calls_in,
    parameters_in,
)
from stepscope.workloads.source import is_main_guard, names_in, training_block

OPEN = "..."
"""Stands where only the user knows what to put."""
_LONGEST = 80
_NO_MAKER = re.compile(r"_?(train|fit|eval|test|valid|save|check|main|run|plot)")
_NOT_TRAINED_WITH = re.compile(r"val|test|eval|(^|_)dev")
_NO_PART = re.compile(r"_(dir|path|folder|root|file|url|name|size)s?$")
_LOSS = re.compile(r"^(crit|criterion|loss_?(fn|func|function|f))$")


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


@dataclass(frozen=True)
class Findings:
    """Source of each part; nothing where none was found."""

    model: str = ""
    loss: str = ""
    step: str = ""
    data: str = ""
    collate: str = ""
    optimizer: str = ""


def findings_in(tree: ast.Module, function: str) -> Findings:
    """What is in a file, for a function of that name, which cannot be made with itself."""
    file = _File(tree, function)
    loader = next(file.loaders(), None)
    step = next(file.steps(), "")
    return Findings(
        model=next(file.models(), ""),
        loss="" if step else next(file.losses(), ""),
        step=step,
        data=next(file.data(), ""),
        collate=file.collate(loader),
        optimizer=next(file.optimizers(), ""),
    )


class _File:
    """A module, as far as it is about a training."""

    def __init__(self, tree: ast.Module, function: str) -> None:
        moved = training_block(tree)
        stays = [node for node in tree.body if node not in moved]
        self._functions = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and node.name != function
            and not _is_workload(node)
        ]
        self._classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        no_parts = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} - {
            node.name for node in self._functions
        }
        self._known = (names_in(stays) | set(dir(builtins))) - no_parts
        guards = [node.body for node in tree.body if is_main_guard(node)]
        bodies = [node.body for node in tree.body if isinstance(node, ast.FunctionDef)]
        inner = [scope for scope in map(Scope, [*guards, *bodies]) if scope.is_training]
        self._scopes = sorted([Scope(tree.body), *inner], key=lambda scope: not scope.loops())

    def models(self) -> Iterator[str]:
        """Of the optimizer or the Trainer, then by name, annotation and class."""
        for scope in self._scopes:
            for call in scope.calls():
                yield from self._written(parameters_in(call), scope)
            for call in scope.calls():
                if called(call).endswith("Trainer"):
                    yield from self._written(argument_of(call, "model"), scope)
                elif called(call) == "fit":
                    yield from self._written(argument_of(call, "model", 0), scope)
        yield from self._by_name_or_class(_MODEL)

    def data(self) -> Iterator[str]:
        """Of the loader or the Trainer, then by name, annotation and class."""
        for scope, call in self.loaders():
            yield from self._written(argument_of(call, "dataset", 0), scope)
        for scope in self._scopes:
            for call in scope.calls():
                if called(call).endswith("Trainer"):
                    yield from self._written(argument_of(call, "train_dataset"), scope)
        yield from self._by_name_or_class(_DATA)

    def loaders(self) -> Iterator[tuple[Scope, ast.Call]]:
        """Calls of DataLoader, first the one that a training loops over."""
        found = [
            (self._is_for_training(call, scope), scope, call)
            for scope in self._scopes
            for call in scope.calls()
            if called(call) == "DataLoader"
        ]
        for _, scope, call in sorted(found, key=lambda each: -each[0]):
            yield scope, call

    def collate(self, loader: tuple[Scope, ast.Call] | None) -> str:
        """That of the loader; in a file without one, the function of that name."""
        if loader:
            scope, call = loader
            return next(self._written(argument_of(call, "collate_fn", 6), scope), "")
        named = (node.name for node in self._functions if re.search(r"(^|_)collate", node.name))
        return next(named, "")

    def steps(self) -> Iterator[str]:
        """Functions of a model and a batch that give the loss, and leave stepping to others."""
        for node in self._functions:
            arguments = [argument.arg for argument in node.args.args]
            if (
                re.search(r"step|loss", node.name)
                and len(arguments) - len(node.args.defaults) == 2
                and _MODEL.name.search(arguments[0].lower())
                and _gives(node)
                and not any(called(call) in ("backward", "step") for call in calls_in(node))
            ):
                yield node.name

    def losses(self) -> Iterator[str]:
        """What the training makes its loss with, then what is called one."""
        for scope in self._scopes:
            for loop in scope.loops():
                yield from self._losses_of(loop, scope)
        for scope in self._scopes:
            for name, value in scope.values.items():
                if isinstance(value, ast.Call) and (
                    _LOSS.match(name.lower()) or called(value).endswith("Loss")
                ):
                    yield from self._written(ast.Name(name, ast.Load()), scope)

    def optimizers(self) -> Iterator[str]:
        """Functions of the parameters that make what the file makes."""
        for scope in self._scopes:
            for call in scope.calls():
                if parameters_in(call) is not None:
                    options = [each for each in call.keywords if each.arg != "params"]
                    given = [ast.Name("parameters", ast.Load()), *call.args[1:]]
                    made = ast.Call(call.func, given, options)
                    yield from self._written(_lambda("parameters", made), scope)

    def _losses_of(self, loop: ast.For, scope: Scope) -> Iterator[str]:
        """Those called as `loss = criterion(output, target)`."""
        stepped = {
            ast.unparse(call.func.value)
            for call in calls_in(loop)
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        }
        for node in ast.walk(loop):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and len(node.value.args) == 2
                and ast.unparse(node.targets[0]) in stepped
                and not any(map(_is_model, (node.value.func, *node.value.args)))
            ):
                yield from self._written(_loss_called(node.value), scope)

    def _is_for_training(self, call: ast.Call, scope: Scope) -> int:
        over = [loop.iter for loop in scope.loops()]
        name = next((name for name, value in scope.values.items() if value is call), "")
        if any(call in ast.walk(each) for each in over):
            return 2
        if any(isinstance(n, ast.Name) and n.id == name for each in over for n in ast.walk(each)):
            return 2
        return 0 if _NOT_TRAINED_WITH.search(name.lower()) else 1

    def _by_name_or_class(self, wanted: _Wanted) -> Iterator[str]:
        classes = dict(_classes(self._classes, wanted))
        for scope in self._scopes:
            named = [
                name
                for name, value in scope.values.items()
                if isinstance(value, ast.Call)
                and (wanted.name.search(name.lower()) or called(value) in classes)
                and not _NO_PART.search(name.lower())
            ]
            for name in sorted(named, key=lambda n: bool(_NOT_TRAINED_WITH.search(n.lower()))):
                yield from self._written(ast.Name(name, ast.Load()), scope)
        for node in self._functions:
            if node.returns is not None and wanted.is_kind(node.returns):
                yield _call(node.name, node.args)
        yield from reversed(_outermost(classes, self._classes))
        for node in self._functions:
            if (
                node.returns is None
                and wanted.name.search(node.name)
                and _gives(node)
                and not _NO_MAKER.match(node.name)
            ):
                yield _call(node.name, node.args)

    def _written(self, node: ast.expr | None, scope: Scope) -> Iterator[str]:
        """The source of an expression, if a function of the module can have it."""
        if node is None:
            return
        try:
            resolved = Resolver(self._known, scope.values).visit(copy.deepcopy(node))
        except Unknown:
            return
        code = ast.unparse(resolved)
        if len(code) <= _LONGEST:
            yield code


def _is_model(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and bool(_MODEL.name.search(node.id.lower()))


def _loss_called(call: ast.Call) -> ast.expr:
    """What is called; with its options, if there are any."""
    if not call.keywords:
        return call.func
    given: list[ast.expr] = [ast.Name(name, ast.Load()) for name in ("output", "target")]
    return _lambda("output, target", ast.Call(call.func, given, call.keywords))


def _lambda(arguments: str, body: ast.expr) -> ast.Lambda:
    made = ast.parse(f"lambda {arguments}: 0", mode="eval").body
    assert isinstance(made, ast.Lambda)
    made.body = body
    return made


def _gives(node: ast.FunctionDef) -> bool:
    """Whether a function returns one thing."""
    returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
    return any(returned) and not any(isinstance(value, ast.Tuple) for value in returned)


def _is_workload(node: ast.FunctionDef) -> bool:
    """Whether a function returns all of a training, like the one that is asked for."""
    returned = (part.value for part in ast.walk(node) if isinstance(part, ast.Return))
    return "workload" in node.name or any(
        isinstance(part, ast.Constant) and part.value == "model"
        for value in returned
        if value is not None
        for part in ast.walk(value)
    )


def _classes(nodes: list[ast.ClassDef], wanted: _Wanted) -> Iterator[tuple[str, str]]:
    """Classes of a kind, with the call that makes one."""
    known: set[str] = set()
    for node in nodes:
        if any(wanted.is_kind(base) or ast.unparse(base) in known for base in node.bases):
            known.add(node.name)
            yield node.name, _call(node.name, _made_with(node))


def _outermost(calls: dict[str, str], nodes: list[ast.ClassDef]) -> list[str]:
    """Those that no other class is made of."""
    used = {
        part.id
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and part.id != node.name
    }
    return [call for name, call in calls.items() if name not in used] or list(calls.values())


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
    filled = (f"{argument.arg}={OPEN}" for argument in needed if argument.arg != "self")
    return f"{name}({', '.join(filled)})"
