"""Parses optional arguments at import, and imports a file of the same folder."""

import argparse

from custom_returns import Numbers, net, step

parser = argparse.ArgumentParser()
parser.add_argument("--count", type=int, default=48)
options = parser.parse_args()


def workload():
    return {"model": net(), "step": step, "data": Numbers(options.count)}
