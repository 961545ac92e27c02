"""Sizes of layers as counted by equation 4.1, compared with values computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from stepscope.workloads.frameworks.torch.models import Built  # noqa: E402
from stepscope.workloads.frameworks.torch.probe import layers_of  # noqa: E402
from stepscope.workloads.probing import Layer  # noqa: E402


def layers(model: nn.Module, *shape: int, samples: int = 2) -> tuple[Layer, ...]:
    built = Built(model, lambda net, batch: net(batch))
    return layers_of(built, torch.zeros(samples, *shape), samples)


def test_a_small_network() -> None:
    """3×10×10 → convolution → 4×8×8 → pooling → 4×4×4 → linear → 5, with 4 bytes per number."""
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    assert layers(net, 3, 10, 10) == (
        Layer("0.0", "Conv2d", (3 * 4 * 9 + 4) * 4, 4 * 8 * 8 * 4),
        Layer("0.1", "ReLU", 0, 4 * 8 * 8 * 4),
        Layer("0.2", "MaxPool2d", 0, 4 * 4 * 4 * 4),
        Layer("1", "Flatten", 0, 64 * 4),
        Layer("2", "Linear", (64 * 5 + 5) * 4, 5 * 4),
    )


def test_sizes_are_per_sample() -> None:
    net = nn.Linear(8, 3)
    assert layers(net, 8, samples=2) == layers(net, 8, samples=7)


def test_parameters_of_a_reused_layer_count_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)

        def forward(self, batch: Any) -> Any:
            return self.layer(self.layer(batch))

    result = layers(Twice(), 4)
    assert [(each.name, each.parameter_bytes, each.output_bytes) for each in result] == [
        ("layer", 80, 16),
        ("layer", 0, 16),
    ]


def test_all_outputs_are_counted() -> None:
    """An LSTM returns 6 outputs and its last two states: (6 + 1 + 1) · 5 numbers."""
    (layer,) = layers(nn.LSTM(3, 5, batch_first=True), 6, 3)
    assert (layer.kind, layer.output_bytes) == ("LSTM", (6 + 1 + 1) * 5 * 4)
    assert layer.parameter_bytes == (4 * 5 * (3 + 5) + 2 * 4 * 5) * 4


def test_the_model_is_not_changed() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    layers(net, 4)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(module._forward_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())
