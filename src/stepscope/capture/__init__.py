"""Monitoring: start a command or attach to a process, sample it, and record its exit status."""
