"""A trial: steady state, throughput with its interval, interference, profile."""
