"""Sweeps: one file that stands for many runs and one table."""
