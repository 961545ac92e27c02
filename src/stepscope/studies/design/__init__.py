"""The design of a study: its file, its rules and its combinations."""
