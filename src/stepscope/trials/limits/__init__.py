"""The limits of a trial and their enforcement."""
