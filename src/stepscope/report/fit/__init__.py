"""The answer of `fit`."""
