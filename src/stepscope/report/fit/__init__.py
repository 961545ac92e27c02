"""Reports of `stepscope fit`."""
