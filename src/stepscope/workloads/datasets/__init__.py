"""Data sets on disk: found, or generated once and reused. No framework is needed for them."""
