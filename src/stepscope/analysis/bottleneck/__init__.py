"""What can hold a training back: a file for each part of the machine, one table of thresholds."""
