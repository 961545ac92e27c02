"""A model layer by layer, as equation 4.1 of Tripathi 2019 counts it: parameters and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepscope.workloads.frameworks.torch.parts import Built
from stepscope.workloads.frameworks.torch.samples import bytes_in
from stepscope.workloads.probing import Layer


def layers_of(built: Built, batch: Any, samples: int) -> list[Layer]:
    """The layers that hold no others, in the order in which a batch goes through them.

    One that is used several times is counted as often, with its parameters once.
    """
    found: list[Layer] = []
    seen: set[nn.Module] = set()
    names = {module: name for name, module in built.model.named_modules()}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        own = 0 if module in seen else sum(p.nbytes for p in module.parameters())
        seen.add(module)
        found.append(Layer(names[module], type(module).__name__, own, bytes_in(output) // samples))

    hooks = [
        module.register_forward_hook(note)
        for module in names
        if not any(True for _ in module.children())
    ]
    try:
        built.model.eval()
        with torch.no_grad():
            built.loss(built.model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found
