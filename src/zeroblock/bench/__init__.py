"""Benchmarks: what a step costs in time and memory, beside the published procedures and measured ceilings."""
