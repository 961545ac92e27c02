"""Trains at import in a way that cannot be detected without running it."""

import torch


class Experiment:
    def run(self):
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            layer(torch.rand(1, 2)).sum().backward()
            optimizer.step()  # it trains here


Experiment().run()


def workload():
    return {}
