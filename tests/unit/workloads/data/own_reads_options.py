"""Reads options when it is imported, all with a default, and uses a file that lies beside it."""

import argparse

from own_returns import Numbers, net, step

parser = argparse.ArgumentParser()
parser.add_argument("--count", type=int, default=48)
options = parser.parse_args()


def workload():
    return {"model": net(), "step": step, "data": Numbers(options.count)}
