"""Exits Python at import because a required argument is missing."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
options = parser.parse_args()  # it ends here


def workload():
    return {}
