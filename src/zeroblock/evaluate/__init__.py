"""Evaluation: what a model scores on a task, by options or by generated text."""
