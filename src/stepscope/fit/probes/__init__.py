"""Probes: short trainings at one batch size in disposable processes."""
