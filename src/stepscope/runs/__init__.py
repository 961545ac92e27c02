"""The run folder: its paths, its append-only writers and its reader (also of a cut-off run)."""
