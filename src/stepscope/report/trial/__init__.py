"""The result of a trial."""
