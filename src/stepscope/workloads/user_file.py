"""Analysis of a user's source file: would importing it train, and what could a workload function
return?"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MODEL_NAME = re.compile(r"model|(^|_)[a-z]{0,3}n(n|et)\d*(_|$)")
_DATA_NAME = re.compile(r"data(set)?s?(_|$)|(^|_)(images|samples|trainset)(_|$)")
_LOSS_NAME = re.compile(r"^(crit|criterion|loss_?(fn|func|function|f))$")
_EVALUATION_NAME = re.compile(r"val|test|eval|(^|_)dev")
_MODEL_BASES = ("Module", "PreTrainedModel")
_DATA_BASES = ("Dataset", "ImageFolder")
_HAVE_A_LOSS = {"lightning", "pytorch_lightning", "transformers"}
"""A LightningModule has a training_step, and models of transformers compute their own loss."""


def names_at_import(tree: ast.Module) -> set[str]:
    """Names that the module defines when it is imported; `*` for a star import."""
    return {name for node in _run_at_import(tree.body) for name in _bound_by(node)}


def functions_in(tree: ast.Module) -> dict[str, Function]:
    nodes = (node for node in _run_at_import(tree.body) if isinstance(node, _FUNCTIONS))
    return {node.name: node for node in nodes}


def training_line(tree: ast.Module) -> int | None:
    """The line that starts training when the file is imported, if there is one.

    Calls are followed into functions of the same file but not into other files: training that is
    not detected here is stopped at its first step.
    """
    training = _training(tree)
    return training[1].lineno if training else None


def skeleton_of(tree: ast.Module, function: str | None) -> str:
    """Source of a function with that name, and of a main guard for code that trains at import."""
    parts = [_function(tree, function)] if function else []
    if training := _training(tree):
        body = f"    ...  # move line {training[0].lineno} and the lines after it here\n"
        parts.append(f'if __name__ == "__main__":\n{body}')
    return "\n\n".join(parts)


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, including those inside `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            if not (field == "body" and _is_main_guard(node)):
                yield from _run_at_import(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _run_at_import(handler.body)


def _bound_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((name.asname or name.name).partition(".")[0] for name in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id


def _is_main_guard(node: ast.AST) -> TypeGuard[ast.If]:
    """`if __name__ == "__main__":`, in either order and with further conditions."""
    if not isinstance(node, ast.If):
        return False
    parts = list(ast.walk(node.test))
    return any(isinstance(part, ast.Eq) for part in parts) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in parts
    )


def _training(tree: ast.Module) -> tuple[ast.stmt, ast.Call] | None:
    """The first statement that trains at import, and the call in it that trains."""
    functions = functions_in(tree)
    trainers = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _called(node.value).endswith("Trainer")
        for name in _bound_by(node)
    }
    followed: set[tuple[str, bool]] = set()

    def find(node: ast.AST, in_loop: bool) -> ast.Call | None:
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            return None
        in_loop = in_loop or isinstance(node, (*_LOOPS, *_COMPREHENSIONS))
        if isinstance(node, ast.Call):
            if _trains(node, in_loop, trainers):
                return node
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in functions and (name, in_loop) not in followed:
                followed.add((name, in_loop))  # once, since functions can be recursive
                if any(find(part, in_loop) for part in functions[name].body):
                    return node
        parts = node.orelse if _is_main_guard(node) else ast.iter_child_nodes(node)
        return next(filter(None, (find(part, in_loop) for part in parts)), None)

    for statement in tree.body:
        if call := find(statement, in_loop=False):
            return statement, call
    return None


def _trains(call: ast.Call, in_loop: bool, trainers: set[str]) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    verb, owner = call.func.attr, ast.unparse(call.func.value)
    if verb == "backward":
        return in_loop
    if verb == "step":
        return in_loop and "opt" in owner.lower()
    if verb in ("fit", "train") and ("trainer" in owner.lower() or owner in trainers):
        return True
    return verb in ("fit", "fit_one_cycle") and bool(re.search(r"model|net|learn", owner.lower()))


def _function(tree: ast.Module, name: str) -> str:
    """A function that returns the parts of a workload found at the top level of the file."""
    training = _training(tree)
    end = training[0].lineno if training else math.inf
    calls = {
        target.id: node.value
        for node in tree.body
        if node.lineno < end and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    # Variables for validation or test data come last.
    calls = dict(sorted(calls.items(), key=lambda item: bool(_EVALUATION_NAME.search(item[0]))))
    packages = {
        (each.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for each in node.names
    }
    losses = (n for n in calls if _LOSS_NAME.match(n) or _called(calls[n]).endswith("Loss"))
    loss = next(losses, "")
    header = ""
    if not loss and not packages & _HAVE_A_LOSS:
        header = "    from torch.nn.functional import cross_entropy\n\n"
        loss = "cross_entropy"
    model, optimizer = "", ""
    for call in calls.values():
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Call) and _called(first) == "parameters":
            model = ast.unparse(first.func).removesuffix(".parameters")
            rest = [*call.args[1:], *call.keywords]
            options = "".join(f", {ast.unparse(each)}" for each in rest)
            optimizer = f"lambda parameters: {ast.unparse(call.func)}(parameters{options})"
    loaders = [call for call in calls.values() if _called(call) == "DataLoader" and call.args]
    data = ast.unparse(loaders[0].args[0]) if loaders else ""
    collate = [k.value for call in loaders[:1] for k in call.keywords if k.arg == "collate_fn"]
    model = model or _find_object(tree, calls, _MODEL_NAME, _MODEL_BASES)
    data = data or _find_object(tree, calls, _DATA_NAME, _DATA_BASES)
    parts = {
        "model": f"{model}," if model else "...,  # a torch.nn.Module",
        "loss": f"{loss}," if loss else "",
        "data": f"{data}," if data else "...,  # a Dataset of single samples",
        "collate": f"{ast.unparse(collate[0])}," if collate else "",
        "optimizer": f"{optimizer}," if optimizer else "",
    }
    lines = [f'        "{key}": {value}\n' for key, value in parts.items() if value]
    return f"def {name}():\n{header}    return {{\n{''.join(lines)}    }}\n"


def _find_object(
    tree: ast.Module, calls: dict[str, ast.Call], name: re.Pattern[str], bases: tuple[str, ...]
) -> str:
    """A variable with a matching name or class, or else a call of the last matching class."""
    classes: dict[str, ast.ClassDef] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names = [ast.unparse(base).partition("[")[0] for base in node.bases]
            names = [base for base in names if not base.endswith("DataModule")]
            if any(base.endswith(bases) or base in classes for base in names):
                classes[node.name] = node
    for variable, call in calls.items():
        if _called(call) in classes or name.search(variable.lower()):
            return variable
    if not classes:
        return ""
    last = classes[next(reversed(classes))]
    inits = [n for n in last.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    arguments = inits[0].args if inits else ast.arguments([], [], None, [], [], None, [])
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[1 : len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [argument for argument, default in keywords if default is None]
    return f"{last.name}({', '.join(f'{each.arg}=...' for each in required)})"


def _called(node: ast.expr) -> str:
    """The name of the called function, without its module or object."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
