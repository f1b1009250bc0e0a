"""Cases that the tests run in every rank of a pool."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import group, layout, note
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zeroblock as zb
from toy import Tiny, snapshot
from zeroblock.method import METHODS
from zeroblock.ranks import channel
from zeroblock.step import Objective

STEPS = 3
Outcome = tuple[dict[str, Tensor], list[zb.Record]]


class Batch(Objective):
    """The loss of some tokens, weighted by ``amount`` where there is one; it can be submitted, on the CPU."""

    def __init__(self, model: nn.Module, number: int, amount: float | None = None, submits: bool = False) -> None:
        self.tokens = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(number))
        self.net, self.amount, self._submits = model, amount, submits

    def __call__(self) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.tokens).float(), self.tokens.roll(-1))

    @property
    def weight(self) -> tuple[str, float] | None:
        return None if self.amount is None else ("tokens", self.amount)

    @property
    def submits(self) -> bool:
        return self._submits

    def submit(self, points: Any) -> Tensor:
        return self.measure(points)


def trained(
    name: str, dtype: torch.dtype, batches: Callable[[nn.Module, int], Any], steps: int = STEPS, **options: Any
) -> Outcome:
    """Weights and records of a run; ``batches`` gives the objective of a step."""
    model = Tiny(depth=1, dtype=dtype)
    if name in ("lozo", "lozo_m", "mezo_bcd_adam"):
        options = {"interval": 2, **options}
    optimizer = METHODS[name](model, lr=5e-3, **options)
    records: list[zb.Record] = []
    optimizer.listener = records.append
    for step in range(steps):
        optimizer.step(batches(model, step))
    optimizer.flush()
    return snapshot(model), records


def batch(model: nn.Module, step: int, share: int, **options: Any) -> Batch:
    return Batch(model, 10 * step + share, **options)


def alone(name: str, dtype: torch.dtype, size: int, **options: Any) -> Outcome:
    """One process that has the micro-batches of ``size`` ranks."""
    return trained(name, dtype, lambda model, step: [batch(model, step, share) for share in range(size)], **options)


def by_data(name: str, dtype: torch.dtype, ranks: int, **options: Any) -> Outcome:
    """Each rank has one micro-batch per step."""
    own = lambda model, step: batch(model, step, dist.get_rank())  # noqa: E731
    return trained(name, dtype, own, parallel=group(ranks), **options)


def by_probes(name: str, dtype: torch.dtype, ranks: int, **options: Any) -> Outcome:
    """Each rank measures some of the probes."""
    one = lambda model, step: batch(model, step, 0)  # noqa: E731
    return trained(name, dtype, one, parallel=layout(ranks, ranks), **options)


def by_default(name: str, parallel: Any = "auto", **options: Any) -> Outcome:
    """Each rank has a micro-batch of its own, and says nothing about the others."""
    own = lambda model, step: batch(model, step, dist.get_rank())  # noqa: E731
    return trained(name, torch.float32, own, parallel=parallel, **options)


def on_mesh(names: tuple[str, str], **options: Any) -> Outcome:
    """A mesh of two shares of the data by two of the probes, in either order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    share = mesh.get_local_rank("data")
    return trained("mezo", torch.bfloat16, lambda model, step: batch(model, step, share), parallel=mesh, **options)


AMOUNTS = [5.0, 3.0, 11.0, 2.5, 7.0]


def uneven(split: list[list[int]], **options: Any) -> Outcome:
    """Each rank has the micro-batches that ``split`` says, with other amounts in every step."""
    share = split[dist.get_rank()]

    def own(model: nn.Module, step: int) -> list[Batch]:
        return [batch(model, step, i, amount=AMOUNTS[(i + step) % 5]) for i in (share if step else share[:1])]

    return trained("mezo_bcd", torch.float32, own, **options)


def submitted(**options: Any) -> Outcome:
    """Steps that are submitted, the message with them, on a stand-in for a GPU's stream."""
    rank = dist.get_rank()

    def own(model: nn.Module, step: int) -> Batch:
        return batch(model, step, rank, amount=AMOUNTS[(rank + step) % 5], submits=True)

    with _stand_in():
        return trained("mezo_bcd", torch.bfloat16, own, **options)


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """Steps may be submitted without a GPU, as in ``conftest.late``; gloo's messages may be part of them."""

    class Late:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self, stream: object) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return False

        def elapsed_time(self, later: object) -> float:
            return 1.0

    class Captures(channel.Channel):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.captures = True

    from zeroblock.ranks import team

    kept = torch.cuda.Event, torch.cuda.current_stream, torch.empty, team.Channel
    empty = torch.empty
    torch.cuda.Event, torch.cuda.current_stream, team.Channel = Late, lambda device=None: None, Captures  # type: ignore
    torch.empty = lambda *shape, pin_memory=False, **options: empty(*shape, **options)  # type: ignore
    try:
        yield
    finally:
        torch.cuda.Event, torch.cuda.current_stream, torch.empty, team.Channel = kept  # type: ignore


def messages(**options: Any) -> list[list[int]]:
    """Bytes of every message that this rank sends, step by step; the first step introduces the ranks."""
    sent: list[list[int]] = []
    send = channel.gather_into

    def counted(out: Tensor, message: Tensor, **rest: Any) -> Any:
        sent[-1].append(message.nbytes)
        return send(out, message, **rest)

    channel.gather_into = counted
    try:
        by_default("mezo", steps=0)
        rank = dist.get_rank()

        def own(model: nn.Module, step: int) -> Batch:
            sent.append([])
            return batch(model, step, rank)

        trained("mezo", torch.float32, own, **options)
    finally:
        channel.gather_into = send
    return sent


def odd_one(seed: int = 0, shift: float = 0.0, lr: float = 1e-3, method: str = "mezo") -> None:
    """A step in which one rank has other settings."""
    odd = dist.get_rank() == 2
    model = Tiny()
    with torch.no_grad():
        model.norm.bias += shift if odd else 0.0
    optimizer = METHODS[method if odd else "mezo"](model, lr=lr if odd else 1e-3, seed=seed if odd else 0)
    optimizer.step(lambda: model(torch.arange(3)).float().square().mean())


def flipped(every: int) -> int:
    """One bit changes on one rank after two steps; the number of steps taken until somebody notices."""
    model = Tiny()
    optimizer = zb.mezo(model, lr=1e-3, parallel=layout(4, every=every))
    objective = Batch(model, 0)
    for step in range(8):
        if step == 2 and dist.get_rank() == 1:
            weight = model.layers[0]["up"].weight.data.view(torch.int32)
            weight[0, 0] ^= 1
        optimizer.step(objective)
    return optimizer.steps


def stumbling(error: str) -> tuple[str, Outcome]:
    """Rank 3 fails in its third step, all hear of it, and all go on; the error of this rank, and the outcome."""
    model = Tiny(depth=1)
    optimizer = zb.mezo_bcd(model, lr=5e-3)
    records: list[zb.Record] = []
    optimizer.listener = records.append
    tripped: list[str] = []
    for step in range(STEPS):
        own = batch(model, step, dist.get_rank())

        def objective(own: Batch = own, step: int = step) -> Tensor:
            if step == 2 and dist.get_rank() == 3:
                raise {"error": ValueError, "interrupt": KeyboardInterrupt}[error]("it tripped")
            return own()

        try:
            optimizer.step(objective)
        except (zb.ZeroBlockError, ValueError, KeyboardInterrupt) as failure:
            assert optimizer.steps == 2
            tripped.append(f"{type(failure).__name__}: {failure}")
            optimizer.step(own)
    return tripped[0], (snapshot(model), records)


def not_finite() -> Outcome:
    """The loss of one rank is not a number in one step."""

    def own(model: nn.Module, step: int) -> Any:
        return (lambda: float("nan")) if step == 1 and dist.get_rank() == 2 else batch(model, step, dist.get_rank())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zb.ZeroBlockWarning)
        return trained("mezo_bcd", torch.float32, own)


def wrapped(on: str) -> tuple[Outcome, int]:
    """DistributedDataParallel, with the optimizer on the wrapper or on the model; and the messages of its buffers."""
    model = Tiny(depth=1)
    model.register_buffer("seen", torch.zeros(3))
    wrapper = DistributedDataParallel(model)
    broadcasts = []
    wrapper._sync_buffers = lambda: broadcasts.append(1)  # type: ignore[method-assign]
    optimizer = zb.mezo_bcd(wrapper if on == "wrapper" else model, lr=5e-3)
    records: list[zb.Record] = []
    optimizer.listener = records.append
    for step in range(STEPS):
        optimizer.step(Batch(wrapper, 10 * step + dist.get_rank()))
    return (snapshot(model), records), len(broadcasts)


def opted_out() -> list[str]:
    """The warnings of an optimizer that goes its own way, and of one that joins."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zb.mezo(Tiny(), parallel=None)
        zb.mezo(Tiny())
    return [str(one.message) for one in caught]


def dying(how: int, timeout_s: float | None = None) -> None:
    """Rank 1 ends or stops in its second step, by a signal; the others wait for it."""
    model = Tiny()
    optimizer = zb.mezo(model, lr=1e-3)
    channel.ROLL_CALL_S = channel.FAREWELL_S = 4.0

    def objective() -> Tensor:
        if optimizer.steps == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), how)
        if optimizer.steps == 1 and timeout_s is not None:
            distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), dist.group.WORLD)
        if optimizer.steps == 1:
            note(f"second/{dist.get_rank()}")
        return model(torch.arange(3)).float().square().mean()

    for _ in range(3):
        optimizer.step(objective)


def decoders() -> Any:
    """The engine's tests' tiny decoders."""
    folder = str(Path(__file__).parents[1] / "engine")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("decoder")


def packed(share: list[list[int]]) -> Outcome:
    """The forked engine on packed rows of a tiny decoder; ``share`` says which examples a rank has."""
    decoder = decoders()
    mine = share[dist.get_rank()] if dist.is_initialized() else share
    model = decoder.decoder("llama")
    engine, optimizer = zb.Engine(model), zb.mezo_bcd(model, lr=1e-3, probes=2)
    records: list[zb.Record] = []
    optimizer.listener = records.append

    def objective(examples: list[int]) -> Any:
        labels = [decoder.LABELS[i] for i in examples]
        return engine.objective([decoder.BATCH[i] for i in examples], labels, over="answer")

    for _ in range(3):
        optimizer.step([objective(examples) for examples in mine])
    assert engine.forked
    return snapshot(model), records


def by_trainer(folder: str, accumulated: int, **options: Any) -> tuple[Outcome, list[str]]:
    """Hugging Face's Trainer on rows in order; ``accumulated`` micro-batches per rank and step."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
    trainer_toy = importlib.import_module("trainer_toy")
    if dist.is_initialized():
        os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is up already

    class InOrder(zb.integrations.ZeroOrderTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    args = trainer_toy.arguments(
        Path(folder), per_device_train_batch_size=2, gradient_accumulation_steps=accumulated, max_steps=3,
        save_strategy="steps", save_steps=3,
    )  # fmt: skip
    trainer = InOrder(
        model=trainer_toy.model(), args=args, train_dataset=trainer_toy.rows(24), data_collator=trainer_toy.Collator(),
        **options,
    )  # fmt: skip
    trainer.train()
    return (snapshot(trainer.model), trainer.ledger.records), sorted(p.name for p in Path(folder).rglob("*.zbj"))
