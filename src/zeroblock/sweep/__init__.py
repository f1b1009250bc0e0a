"""Sweeps: one file that describes many runs and one table."""
