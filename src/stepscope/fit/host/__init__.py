"""Host memory: the max batch size where the CPU computes."""
