"""Trials: a workload in isolated, limited and monitored processes, with cleanup."""
