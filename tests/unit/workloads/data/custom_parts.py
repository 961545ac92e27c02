"""A module that a user's file imports."""

from torch import nn


class WrongModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x)  # in forward: wrong module
