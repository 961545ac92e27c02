"""Datasets on disk, found or generated once and reused. They do not need a framework."""
