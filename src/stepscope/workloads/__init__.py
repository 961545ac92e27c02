"""Workloads: settings, models and data by name, custom workloads, and framework adapters.

No module here imports a framework before a training starts.
"""
