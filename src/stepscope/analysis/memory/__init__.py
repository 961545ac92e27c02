"""Memory: the caching allocator, the memory model, the bracket search."""
