"""GPU and host memory: the caching allocator, the memory model, the bracket search."""
