"""Analysis of a run: series, epochs, steps, GPUs and the summary."""
