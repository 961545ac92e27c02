"""Sensors: one module per source, one common interface."""
