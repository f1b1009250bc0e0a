"""Demonstrations: examples with their right option, written before the prompt (in-context learning).

This follows MeZO's ``icl.sh``: every evaluated example has its own demonstrations, drawn at random from
the training examples.  Each is a context with its right option, stripped at both ends.  Two newlines
separate them from each other and from the prompt, in all eleven tasks.  The encoder cuts
prompts that are too long for the model, on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        shots: demonstrations per prompt; 0 leaves prompts as they are.
        seed: the data seed.
    """

    pool: Sequence[Example]
    shots: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shots > len(self.pool):
            raise ZeroBlockError(
                f"--shots {self.shots} needs as many training examples, and there are {len(self.pool)}: lower --shots"
            )

    def __call__(self, example: Example, number: int) -> Example:
        """Write demonstrations before the context of an example.

        Args:
            example: the one to evaluate.
            number: its index in its split, which decides its demonstrations.
        """
        if not self.shots:
            return example
        chosen = draw(self.shots, len(self.pool), Key(self.seed, number, DEMONSTRATION, DATA))
        written = [(self.pool[i].context + self.pool[i].target).strip() for i in chosen]
        return example.after(SEPARATOR.join([*written, ""]))
