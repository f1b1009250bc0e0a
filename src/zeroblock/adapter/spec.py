"""The description of an adapter: a few numbers and a seed, from which a journal can make it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ..errors import ZeroBlockError, shown, unknown

if TYPE_CHECKING:
    from torch import nn

MAX_SIZE = 4096
"""The largest rank, and the largest number of tokens in a prefix."""
MAX_ALPHA = 1e6


@dataclass(frozen=True)
class Lora:
    """A low-rank product next to some matrices of a model: y = Wx + (alpha/r)·BAx.

    B is zero at the start, and A is uniform in ±1/√n for inputs of size n, as in PEFT and MeZO.  A comes from
    the counter noise and not from torch, so it is the same on every machine.

    Args:
        r: rows of A, (r, n), and columns of B, (m, r).
        alpha: scales the product.
        targets: the last parts of modules' names (``q_proj``), or q, k, v and the like, whatever a family calls
            them; ``all`` is every matrix of a layer.
        seed: the seed of A.

    >>> Lora.parse("r=4,targets=q,v").text
    'r=4,alpha=16,targets=q,v'
    """

    r: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "v")
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.r <= MAX_SIZE:
            raise ZeroBlockError(f"lora: r must be from 1 to {MAX_SIZE}, got {self.r}")
        if not 0 < self.alpha <= MAX_ALPHA:
            raise ZeroBlockError(f"lora: alpha must be positive, and at most {MAX_ALPHA:g}, got {self.alpha:g}")
        if not self.targets or not all(self.targets):
            raise ZeroBlockError("lora: name the modules to adapt, as in targets=q,v")

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Self:
        """Read the text of the command line, such as ``r=8,alpha=16,targets=q,v``; alpha and targets may be left out.

        Args:
            text: settings separated by commas; words after ``targets=`` without ``=`` are targets, too.
            seed: the seed of the adapter.
        """
        given: dict[str, list[str]] = {}
        name = ""
        for word in (word.strip() for word in text.split(",")):
            key, equals, value = word.partition("=")
            if equals:
                name = key.strip()
                if name not in ("r", "alpha", "targets", "dropout"):
                    raise unknown("setting of lora:", name, ("r", "alpha", "targets"))
                if name in given:
                    raise ZeroBlockError(f"lora: {name} is given twice in {text!r}")
                given[name] = [value.strip()]
            elif name == "targets":
                given[name].append(word)
            else:
                raise ZeroBlockError(f"lora: {text!r} is not of the form r=8,alpha=16,targets=q,v")
        if "r" not in given:
            raise ZeroBlockError("lora: give the rank, as in r=8,targets=q,v")
        try:
            numbers = {name: float(given[name][0]) for name in ("r", "alpha", "dropout") if name in given}
        except ValueError as error:
            raise ZeroBlockError(f"lora: r and alpha are numbers, as in r=8,alpha=16, not {text!r}") from error
        if numbers.pop("dropout", 0.0):
            raise ZeroBlockError("lora: steps compare two losses, so nothing may be dropped: leave out dropout")
        rank = numbers.pop("r")
        if not rank.is_integer():
            raise ZeroBlockError(f"lora: r is a whole number, got {rank:g}")
        targets = {"targets": tuple(dict.fromkeys(given["targets"]))} if "targets" in given else {}
        return cls(int(rank), **numbers, **targets, seed=seed)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """This adapter as the command line takes it."""
        return f"r={self.r},alpha={self.alpha:g},targets={','.join(self.targets)}"

    def attach(self, model: nn.Module) -> nn.Module:
        """Freeze a model and put the adapter into it.

        Args:
            model: a model of transformers, changed in place.

        Returns:
            The ``PeftModel`` around it.
        """
        from .attach import attach_lora

        return attach_lora(model, self.r, self.alpha, self.targets, self.seed)

    def record(self, model: nn.Module) -> dict[str, Any]:
        """This adapter as plain data for a journal, with the names that its targets have in a model.

        Args:
            model: the model that it was attached to.
        """
        targets: Any = model.peft_config["default"].target_modules  # type: ignore[union-attr,index]
        return {"kind": "lora", **dataclasses.asdict(self), "targets": sorted(targets)}


@dataclass(frozen=True)
class Prefix:
    """Trained keys and values of virtual tokens, which every layer sees before the text (prefix tuning).

    As in MeZO, they start as the real keys and values of random tokens.  The model computes those, so another
    machine may get other last bits; for that reason a run saves its start.

    Args:
        tokens: the number of virtual tokens; MeZO takes 5.
        seed: the seed of the random tokens.
    """

    tokens: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_SIZE:
            raise ZeroBlockError(f"prefix must have from 1 to {MAX_SIZE} tokens, got {self.tokens}")

    @property
    def text(self) -> str:
        """The number of tokens, as the command line takes it."""
        return str(self.tokens)

    def attach(self, model: nn.Module) -> nn.Module:
        """Freeze a model and put the prefix before its layers; see :meth:`Lora.attach`."""
        from .attach import attach_prefix

        return attach_prefix(model, self.tokens, self.seed)

    def record(self, model: nn.Module) -> dict[str, Any]:
        """This adapter as plain data for a journal."""
        return {"kind": "prefix", **dataclasses.asdict(self)}


Adapter = Lora | Prefix
KINDS: dict[str, type[Adapter]] = {"lora": Lora, "prefix": Prefix}


def recorded(extra: Mapping[str, Any]) -> Adapter | None:
    """The adapter that a journal's run made, from the header's ``extra``; None if it made none.

    >>> recorded({"adapter": {"kind": "prefix", "tokens": 5, "seed": 1}})
    Prefix(tokens=5, seed=1)
    """
    data = extra.get("adapter")
    if data is None:
        return None
    try:
        fields = dict(data)
        kind = KINDS[fields.pop("kind")]
        if "targets" in fields:
            fields["targets"] = tuple(fields["targets"])
        made = kind(**fields)
        whole = [getattr(made, name) for name in ("r", "tokens", "seed") if hasattr(made, name)]
        if (
            any(type(one) is not int for one in whole)
            or not 0 <= made.seed < 1 << 64
            or not all(isinstance(t, str) for t in fields.get("targets", ()))
        ):
            raise TypeError
    except (TypeError, ValueError, KeyError) as error:
        raise ZeroBlockError(f"the journal's adapter is not one that zeroblock knows: {shown(data)}") from error
    return made
