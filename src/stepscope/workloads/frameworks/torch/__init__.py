"""PyTorch adapter: models, datasets, training loop, ranks and profiler."""
