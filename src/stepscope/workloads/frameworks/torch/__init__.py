"""PyTorch adapter: models, data sets, training loop, ranks and profiler."""
