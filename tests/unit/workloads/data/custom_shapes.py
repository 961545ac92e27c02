"""A user's file with workloads whose first step fails."""

from custom_parts import WrongModule
from custom_returns import Dicts, Numbers, net
from torch import nn


class WrongLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x)  # in forward: wrong layer


class WrongLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = net()

    def forward(self, x, labels):
        return (self.layer(x) @ labels).sum()  # in forward: wrong labels


def step(model, batch):
    x, y = batch
    return (model(x) @ y).sum()  # in step: wrong target


def with_wrong_layer():
    return {"model": WrongLayer(), "loss": nn.MSELoss(), "data": Numbers()}


def with_wrong_step():
    return {"model": net(), "step": step, "data": Numbers()}


def with_wrong_sequence():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 1))
    return {"model": model, "loss": nn.MSELoss(), "data": Numbers()}


def with_wrong_target():
    return {"model": nn.Linear(4, 3), "loss": nn.CrossEntropyLoss(), "data": Numbers()}


def with_wrong_dict():
    return {"model": WrongLabels(), "data": Dicts()}


def with_wrong_module():
    return {"model": WrongModule(), "loss": nn.MSELoss(), "data": Numbers()}


def with_too_much_memory():
    def step(model, batch):
        raise MemoryError  # out of memory

    return {"model": net(), "step": step, "data": Numbers()}
