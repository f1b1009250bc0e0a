"""Metrics score one prediction, from 0 to 1; the value of a task is the mean over its examples."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .example import Example

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(prediction: int, example: Example) -> float:
    """Return 1 if the predicted option is right: the label, or one of several.

    Args:
        prediction: index of the option.
        example: the example it was predicted for.
    """
    return float(prediction in example.right)


def normalize(text: str) -> str:
    """Bring a text to SQuAD's normal form: lower case, no punctuation, no articles, single spaces.

    >>> normalize("The  Eiffel Tower!")
    'eiffel tower'
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, example: Example) -> float:
    """Compute the token F1 of two normalized texts, the best over the gold answers.

    If one of them is empty after normalization (a gold answer "A"), they match only if both are
    empty, as in SQuAD's second evaluation script.

    Args:
        prediction: the generated text.
        example: the example it was generated for.
    """
    return max(
        (_overlap(normalize(prediction).split(), normalize(gold).split()) for gold in example.answers), default=0.0
    )


def exact_match(prediction: str, example: Example) -> float:
    """Return 1 if the normalized text equals one of the normalized gold answers.

    Args:
        prediction: the generated text.
        example: the example it was generated for.
    """
    return float(any(normalize(prediction) == normalize(gold) for gold in example.answers))


def likelihood(loss: float, example: Example | None = None) -> float:
    """Compute the probability per token, exp(-loss): the geometric mean over the tokens that carry loss.

    It ranks models as the held-out loss does, and like other metrics it is between 0 and 1; its
    inverse is the perplexity.

    Args:
        loss: the mean negative log-probability per token.
        example: ignored.
    """
    return 0.0 if math.isnan(loss) else min(1.0, math.exp(-loss))


def _overlap(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold))  # = 2PR / (P + R)


@dataclass(frozen=True)
class Metric:
    """A named score.

    Args:
        name: the printed name.
        score: takes a prediction and its example, and returns a number from 0 to 1.
        generates: whether the prediction is a generated text rather than an option's index.
        of_loss: whether it scores the loss instead of a prediction.
    """

    name: str
    score: Callable[..., float]
    generates: bool = False
    of_loss: bool = False


ACCURACY = Metric("accuracy", accuracy)
F1 = Metric("f1", f1, generates=True)
EXACT_MATCH = Metric("exact_match", exact_match, generates=True)
LIKELIHOOD = Metric("likelihood", likelihood, of_loss=True)
METRICS: dict[str, Metric] = {metric.name: metric for metric in (ACCURACY, F1, EXACT_MATCH, LIKELIHOOD)}


def is_loss(name: str) -> bool:
    """Whether the metric of this name is only a function of the loss, so that reports show the loss instead."""
    return name in METRICS and METRICS[name].of_loss


def worded(name: str, value: float, unit: str = "%") -> str:
    """Format the value of a metric: in percent, or for a likelihood as its loss.

    Args:
        name: the name of the metric.
        value: the value, from 0 to 1.
        unit: the percent sign, which may have a space before it.

    >>> worded("f1", 0.5), worded("f1", 0.5, " %"), worded("likelihood", 0.5)
    ('f1 50.0%', 'f1 50.0 %', 'loss 0.6931')
    """
    if not is_loss(name):
        return f"{name} {100 * value:.1f}{unit}"
    return f"loss {-math.log(value):.4f}" if value > 0 else "loss not finite"
