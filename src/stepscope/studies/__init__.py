"""Studies: designs, the engine that runs each trial once, and the study folder."""
