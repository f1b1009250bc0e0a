"""The papers' claims about the memory of their methods, next to the numbers of the memory table."""

from __future__ import annotations

from collections.abc import Sequence

from .memory import Need, gigabytes

NOT_STATED = "not stated"
CLAIMS = {
    "mezo": "the memory of inference; 25.9 GB ¹",
    "mezo_adam": "73.4 GB ¹",
    "mezo_bcd": "no more than MeZO; 25.3 GB ¹",
    "mezo_bcd_adam": "26.5 GB ¹",
    "lozo": "25.5 GB ¹",
    "lozo_m": "momentum at negligible extra memory",
    "sparse_mezo": "the memory of inference; 26.1 GB ¹",
    "lezo": "no more than MeZO",
    "fzoo": "the memory of inference",
    "eggroll": "r·(m + n) per matrix and member, not m·n",
    "adamezo": "no moments are kept",
    "mezo_svrg": "half of SGD with backpropagation",
    "hizoo": "keeps the memory advantage of zeroth-order methods",
    "conmezo": "the low memory footprint of zeroth-order methods",
    "subzero": "less than dense perturbations",
}
"""The claims by method; a method is missing if it has no paper or its paper does not claim any.

¹ are peaks of OPT-13B on sst2 in fp16, batch 16, on an A100, as the paper of MeZO-BCD reports them."""


def markdown(needs: Sequence[Need]) -> list[str]:
    """The memory table with the claims, as the lines of a Markdown table.

    >>> markdown([Need("mezo", 10**9, 10**8, 0, 2)])[-1]
    '| `mezo` | 2.20 | 1.100 | 0 | the memory of inference; 25.9 GB ¹ |'
    """
    lines = [
        "| method | as published, GB | × weights | kept here, GB | its paper's claim |",
        "|---|---:|---:|---:|---|",
    ]
    for need in needs:
        kept = gigabytes(need.kept_here) if need.kept_here else "0"
        claim = CLAIMS.get(need.method, NOT_STATED)
        lines.append(
            f"| `{need.method}` | {gigabytes(need.total_bytes)} | {need.over_weights:.3f} | {kept} | {claim} |"
        )
    return lines
