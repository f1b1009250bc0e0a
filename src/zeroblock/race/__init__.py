"""Races: several methods on one model and task, at equal wall clock."""
