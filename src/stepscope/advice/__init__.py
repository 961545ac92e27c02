"""Planners and answers on what was measured: what fits."""
