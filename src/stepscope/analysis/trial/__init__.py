"""Analysis of a trial: steady state, throughput with its interval, interference, measurement."""
