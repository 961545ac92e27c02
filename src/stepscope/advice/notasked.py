"""What a fit is not to be told. Apart, since the command line needs it before anything else."""

from __future__ import annotations

NOT_ASKED = ("batch_size", "epochs", "steps", "seconds")
"""Knobs that a fit finds out, or has no use for."""
