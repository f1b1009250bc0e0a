"""The theory lab: the paper's theory drawn, checked numerically, and measured on a model of one's own.

Everything that descends does so through :class:`zeroblock.ZeroOrder`: a projection of the paper is a
composition of the library's own parts (:mod:`.projection`), so what is measured here is what trains a model.

    hessian, spectrum       quadratic.py     the random quadratic and its module
    M                       projection.py    the three projections of Definition 3.5, and the γ-controlled one
    ρ                       alignment.py     draws of ρ, its mean and variance in closed form
    theorems                bounds.py        calculators with checked preconditions
    lemmas                  moment.py        the identities behind the proofs, and where they fail

``zeroblock lab all --out DIR`` draws every figure; ``docs/theory.md`` reads them.
"""
