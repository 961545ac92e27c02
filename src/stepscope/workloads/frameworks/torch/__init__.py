"""PyTorch: models, data sets, the loop, ranks, the profiler."""
