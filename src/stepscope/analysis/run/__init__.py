"""A run: series, epochs, steps, GPUs and the summary."""
