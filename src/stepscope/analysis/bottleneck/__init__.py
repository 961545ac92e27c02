"""Causes of bottlenecks, one module for each part of the machine, and one table of thresholds."""
