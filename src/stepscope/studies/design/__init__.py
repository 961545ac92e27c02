"""The design of a study: its file, its rules, its points."""
