"""The parts of `tests/attack/fuzz.py`: intact folders, damage, readers and checks."""
