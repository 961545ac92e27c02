"""The bottleneck of a run."""
