"""The theory lab draws the paper's theory, checks it numerically, and measures its quantities on a model.

A projection of the paper is a composition of the library's own parts (:mod:`.projection`), which
:class:`zeroblock.ZeroOrder` runs.  Studies over many seeds and learning rates use a batched form of the same steps
(:mod:`.batched`), which the tests compare with ``ZeroOrder``.

    quadratic.py                        the random quadratic and its module
    projection.py, batched.py           the three projections of Definition 3.5, as optimizers and as batches of runs
    alignment.py                        draws of ρ; its mean, variance and largest value in closed form
    bounds.py                           the theorems as calculators with checked preconditions
    check.py                            one line of the paper and its measurement
    moment.py, smoothing.py, event.py   the lemmas: moments, smoothed losses, events and concentration
    rate.py, stability.py               Theorems 3.3 and 3.10 against runs
    study.py and the other files        the studies of ``zeroblock lab``
    model.py, depth.py, profile.py      measurements of a language model, along a run, and figures of them

``zeroblock lab all --out DIR`` draws every figure; ``docs/theory.md`` explains them.
"""
