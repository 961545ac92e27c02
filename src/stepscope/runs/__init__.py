"""The run folder: its paths, its append-only writers, and its readers (also of truncated runs)."""
