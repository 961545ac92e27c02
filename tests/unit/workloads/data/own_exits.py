"""Ends Python when it is imported: it wants an option that nobody gives."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
options = parser.parse_args()  # it ends here


def workload():
    return {}
