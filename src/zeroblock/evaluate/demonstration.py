"""Demonstrations: examples with their right option, written before the prompt (in-context learning).

As in MeZO's ``icl.sh``: every evaluated example has its own demonstrations, drawn at random from the
training examples; each is its context with the right option, stripped at both ends; they are joined, and
the prompt joined to them, by two newlines, which is the separator there for all eleven tasks.  What does
not fit the model is cut on the left by the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import ZeroBlockError
from ..noise import Key
from ..task import Example
from ..task.draw import DATA, DEMONSTRATION, draw

SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Demonstrations:
    """Writes demonstrations before prompts.

    Args:
        pool: the training examples.
        shots: how many a prompt; none leaves it as it is.
        seed: the data seed.
    """

    pool: Sequence[Example]
    shots: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shots > len(self.pool):
            raise ZeroBlockError(f"{self.shots} shots of {len(self.pool)} training examples: lower --shots")

    def __call__(self, example: Example, number: int) -> Example:
        """The example with demonstrations before its context.

        Args:
            example: the one to be evaluated.
            number: its place in its split, the address of its draw.
        """
        if not self.shots:
            return example
        chosen = draw(self.shots, len(self.pool), Key(self.seed, number, DEMONSTRATION, DATA))
        written = [(self.pool[i].context + self.pool[i].target).strip() for i in chosen]
        return replace(example, context=SEPARATOR.join([*written, example.context]))
