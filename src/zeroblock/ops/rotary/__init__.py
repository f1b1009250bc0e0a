"""Rotary positions, (a, b) → (a·cos - b·sin, b·cos + a·sin) for the halves of a head: one kernel instead of ten."""
