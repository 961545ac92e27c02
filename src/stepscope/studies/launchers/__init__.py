"""Launchers start the trials of a study, on this machine or on others."""
