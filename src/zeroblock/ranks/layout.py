"""The layout of a run's ranks: which rank measures which micro-batches and which probes."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any, Literal

import torch.distributed as dist

from ..errors import ZeroBlockError, ZeroBlockWarning

AGREE_STEPS = 1000
"""Steps from one comparison of the ranks' weights to the next."""
DATA, PROBES = "data", "probes"
START = "start the processes with torchrun, or call torch.distributed.init_process_group first"

Parallel = Literal["auto", "data", "probes", "data,probes"] | Any
"""How ranks share the work of a step; see :meth:`Ranks.of`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that take one run's steps together.

    Shares of the ``data`` have different micro-batches, whose losses are averaged in the order of the shares.
    Shares of the ``probes`` have the same micro-batches, and each measures some of the probes.  Every rank takes
    every step.

    >>> ranks = Ranks.of("data,probes", probes=4)                               # doctest: +SKIP
    >>> ranks.place                                                             # doctest: +SKIP
    (0, 1)

    Args:
        group: the processes.
        grid: (shares of the data, shares of the probes) the ranks within ``group``.
        by_probe: measure probe after probe, so that losses do not depend on how many ranks share the probes.
        every: steps from one comparison of the weights to the next.
    """

    group: Any
    grid: tuple[tuple[int, ...], ...]
    by_probe: bool = False
    every: int = AGREE_STEPS

    def __post_init__(self) -> None:
        listed = sorted(rank for row in self.grid for rank in row)
        if listed != list(range(dist.get_world_size(self.group))) or len({len(row) for row in self.grid}) != 1:
            raise ZeroBlockError(f"the grid {self.grid} must be a rectangle that names every rank of the group once")
        if self.every < 1:
            raise ZeroBlockError(f"every must be at least 1, got {self.every}")

    @classmethod
    def of(cls, parallel: Parallel = "auto", *, probes: int = 1) -> Ranks | None:
        """The ranks that ``ZeroOrder(..., parallel=...)`` means.

        Args:
            parallel: "auto" (share the data if a process group of several ranks is running, otherwise nothing),
                "data", "probes", "data,probes" (the greatest common divisor of ranks and probes is the number of
                shares of the probes), "data=2,probes=4", a process group (its ranks share the data), a ``DeviceMesh``
                whose dimensions are called "data" and "probes", ``Ranks`` itself, or None for a process on its own.
            probes: number of probes of the estimator.

        Returns:
            The ranks; None if there are no others to share with.
        """
        ranks = cls._of(parallel, probes)
        if ranks is not None and len(ranks.grid[0]) > probes:
            warnings.warn(
                f"{len(ranks.grid[0])} ranks share {probes} probes, and {len(ranks.grid[0]) - probes} of them measure "
                "nothing: raise probes, or share the data",
                ZeroBlockWarning,
                stacklevel=4,
            )
        return ranks

    @classmethod
    def _of(cls, parallel: Parallel, probes: int) -> Ranks | None:
        if isinstance(parallel, Ranks):
            return parallel
        up = dist.is_available() and dist.is_initialized()
        several = up and dist.get_world_size() > 1
        if parallel is None:
            if several:
                warnings.warn(
                    f"parallel=None: this optimizer does not join the {dist.get_world_size()} processes of the group, "
                    "and the weights of processes with different data drift apart; leave it out to average the losses",
                    ZeroBlockWarning,
                    stacklevel=5,
                )
            return None
        if isinstance(parallel, str):
            if parallel == "auto" and not several:
                return None
            if not up:
                raise ZeroBlockError(f"parallel={parallel!r} needs a process group: {START}")
            return cls._of_words(parallel, probes)
        if hasattr(parallel, "mesh_dim_names"):
            return cls._of_mesh(parallel)
        if up and isinstance(parallel, dist.ProcessGroup):
            return cls(parallel, tuple((rank,) for rank in range(parallel.size())))
        raise ZeroBlockError(
            "parallel must be 'data', 'probes', 'data,probes', a process group, a DeviceMesh, Ranks or None, "
            f"got {parallel!r}"
        )

    @classmethod
    def _of_words(cls, text: str, probes: int) -> Ranks:
        """From "data,probes", with or without numbers."""
        size = dist.get_world_size()
        sizes: dict[str, int] = {}
        for word in ("data" if text == "auto" else text).split(","):
            name, _, number = word.strip().partition("=")
            if name not in (DATA, PROBES) or name in sizes or not (number.isdigit() or not number) or number == "0":
                raise ZeroBlockError(
                    f"parallel={text!r} is not 'data', 'probes' or 'data,probes' (optionally with the number of ranks: "
                    "'data=2,probes=4')"
                )
            sizes[name] = int(number or 0)
        rest = size // max(1, math.prod(number for number in sizes.values() if number))
        columns = sizes.get(PROBES, 1) or (math.gcd(rest, probes) if sizes.get(DATA) == 0 else rest)
        rows = sizes.get(DATA, 1) or size // columns
        if rows * columns != size:
            raise ZeroBlockError(f"parallel={text!r} needs {rows * columns} ranks, the process group has {size}")
        grid = tuple(tuple(range(d * columns, (d + 1) * columns)) for d in range(rows))
        return cls(dist.group.WORLD, grid, by_probe=PROBES in sizes)

    @classmethod
    def _of_mesh(cls, mesh: Any) -> Ranks:
        """From a device mesh of one or two dimensions; a dimension without a known name is the data's."""
        names = tuple(mesh.mesh_dim_names or ())
        if mesh.ndim == 1:
            columns = names == (PROBES,)
            group, ranks = mesh.get_group(), range(mesh.size())
            return cls(group, (tuple(ranks),) if columns else tuple((rank,) for rank in ranks), by_probe=columns)
        if sorted(names) != [DATA, PROBES]:
            raise ZeroBlockError(
                f"a mesh with dimensions {names or mesh.ndim} does not say what ranks share: call them 'data' and "
                "'probes' (init_device_mesh(..., mesh_dim_names=('data', 'probes'))), and give mesh['data', 'probes'] "
                "of a larger one"
            )
        table = mesh.mesh if names == (DATA, PROBES) else mesh.mesh.T
        group = mesh._flatten().get_group()
        place = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
        return cls(group, tuple(tuple(place[rank] for rank in row) for row in table.tolist()), by_probe=True)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.grid))

    @functools.cached_property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    @functools.cached_property
    def place(self) -> tuple[int, int]:
        """This process's share of the data and of the probes, each counted from 0."""
        return next((d, row.index(self.rank)) for d, row in enumerate(self.grid) if self.rank in row)

    @functools.cached_property
    def apart(self) -> list[int]:
        """The global ranks that measure other probes than this process."""
        return [self.names[rank] for row in self.grid for share, rank in enumerate(row) if share != self.place[1]]

    @functools.cached_property
    def names(self) -> list[int]:
        """The global ranks of the group."""
        return list(dist.get_process_group_ranks(self.group))

    def __str__(self) -> str:
        return f"data={len(self.grid)},probes={len(self.grid[0])}" if self.by_probe else f"data={len(self.grid)}"
