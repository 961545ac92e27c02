"""The limits of a trial, and how they are enforced."""
