"""The function that a user's file lacks, written for them from what is in the file."""

from __future__ import annotations

import ast

from stepscope.workloads.findings import OPEN, findings_in
from stepscope.workloads.source import asks_at_import, training_block

_BRING_A_LOSS = {"lightning", "pytorch_lightning", "transformers"}
"""A LightningModule has its training_step, a model of transformers looks at the labels itself."""


def skeleton_of(tree: ast.Module, function: str | None, guard: bool = False) -> str:
    """Source of a function with that name, and of a place for what should not run at import."""
    parts = [_function(tree, function)] if function else []
    place = _guard(tree) if guard else ""
    if place:
        parts.append(place)
    return "\n\n".join(parts)


def _function(tree: ast.Module, name: str) -> str:
    found = findings_in(tree, name)
    model = f"{found.model}," if found.model else f"{OPEN},  # a torch.nn.Module"
    data = f"{found.data}," if found.data else f"{OPEN},  # a Dataset, not yet in batches"
    imported, loss = "", f"{found.loss}," if found.loss else ""
    if not (loss or found.step or _imported(tree) & _BRING_A_LOSS):
        imported = "    from torch.nn.functional import cross_entropy\n\n"
        loss = "cross_entropy,  # of the model's output and the target"
    parts = {
        "model": model,
        "loss": loss,
        "step": f"{found.step}," if found.step else "",
        "data": data,
        "collate": f"{found.collate}," if found.collate else "",
        "optimizer": f"{found.optimizer}," if found.optimizer else "",
    }
    lines = "".join(f'        "{key}": {value}\n' for key, value in parts.items() if value)
    return f"def {name}():\n{imported}    return {{\n{lines}    }}\n"


def _guard(tree: ast.Module) -> str:
    """The place for what trains or asks, with the lines that belong there; none if none do."""
    moved = training_block(tree)
    lines = [f"move {' and '.join(_ranges(tree.body, moved))} here"] if moved else []
    inside = {line for node in moved for line in range(node.lineno, _end(node) + 1)}
    lines += [
        f"line {line} calls {call}: move it here, {_why(call)}"
        for line, call in asks_at_import(tree).items()
        if line not in inside
    ]
    if not lines:
        return ""
    return 'if __name__ == "__main__":\n' + "".join(f"    {OPEN}  # {line}\n" for line in lines)


def _why(call: str) -> str:
    if call.endswith("_args()"):
        return "or give every option a default"
    return "as nobody answers in a trial"


def _ranges(body: list[ast.stmt], moved: list[ast.stmt]) -> list[str]:
    """The lines of statements, those that follow each other in one."""
    ranges: list[tuple[int, int]] = []
    for before, node in zip([None, *body], body, strict=False):
        if node in moved:
            start = ranges.pop()[0] if before in moved else node.lineno
            ranges.append((start, _end(node)))
    return [f"line {a}" if a == b else f"lines {a} to {b}" for a, b in ranges]


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _imported(tree: ast.Module) -> set[str]:
    """The packages that a file uses."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}
