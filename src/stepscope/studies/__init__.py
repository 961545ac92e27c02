"""Many trials: designs, the engine that runs them exactly once, and what they leave."""
