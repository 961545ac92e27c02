"""Watching: start a command or attach to a process, sample it, and say how it ended."""
