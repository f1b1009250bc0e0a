"""Benchmarks: the cost of a step in time and memory, next to the published procedures and measured ceilings.

This package holds everything that measures: ``zeroblock bench`` is its command line.  The scripts of
``bench/`` in the repository measure one operation each, under the name it has in ``zeroblock.ops``;
their shared code is in :mod:`.script`.
"""
