"""Functions of ours that stand in for a framework's own, and look like them. Never raises."""

import sys


def dressed_as(original, replacement):
    """Looks like the original in a traceback, to `help` and to `inspect`."""
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        try:
            setattr(replacement, attribute, getattr(original, attribute))
        except AttributeError:
            pass
    replacement.__wrapped__ = original
    return replacement


def with_signature(original, replacement):
    """For those who look at the parameters without following `__wrapped__`."""
    try:
        replacement.__annotations__ = dict(original.__annotations__)
        replacement.__signature__ = sys.modules["inspect"].signature(original)
    except Exception:
        pass
    return replacement
