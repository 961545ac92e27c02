"""One isolated run: a workload in its own processes, within its limits, watched, cleaned up."""
