"""Pure functions from what was recorded to what it means. Sees no process, GPU or disk."""
