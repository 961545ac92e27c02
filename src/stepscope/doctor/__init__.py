"""`stepscope doctor`: available sensors, their cost and accuracy, and the machine."""
