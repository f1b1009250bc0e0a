"""Runners: ways to carry out the plan of a step.

``host`` measures, waits and updates; any objective runs there.  ``stream`` submits the whole
step to the device and does not wait.  ``graph`` does the same with a captured CUDA graph.
``queue`` delivers the numbers of submitted steps, in order, as they arrive.
"""
