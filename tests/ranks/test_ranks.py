"""Ranks that share data or probes take the steps of one process, to the bit."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest
import rank_case
import torch
from pool import Failure, Pool
from rank_case import AMOUNTS, Outcome, alone, batch, trained

import zeroblock as zb
from toy import Tiny, same, snapshot
from zeroblock.method import METHODS
from zeroblock.ranks.checksum import checksum
from zeroblock.ranks.message import ABSENT, mean, shares


def equal(a: Outcome, b: Outcome) -> bool:
    return a[1] == b[1] and same(a[0], b[0])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("dtype", "data", "probes"), [(torch.float32, 4, (2,)), (torch.bfloat16, 2, (1, 4))], ids=["fp32", "bf16"]
)
def test_ranks_equal_one_process(pool: Pool, name: str, dtype: torch.dtype, data: int, probes: tuple[int, ...]) -> None:
    """Data on ranks is a list of as many micro-batches; probes on some ranks are the probes of one."""
    micro_batches, four = alone(name, dtype, data), alone(name, dtype, 1, probes=4)
    assert not equal(micro_batches, four)
    assert all(equal(outcome, micro_batches) for outcome in pool.run(rank_case.by_data, name, dtype, data, size=data))
    for size in probes:
        assert all(equal(one, four) for one in pool.run(rank_case.by_probes, name, dtype, size, size=size, probes=4))


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": zb.OneSided(1e-3, probes=3)},  # θ belongs to the first probe; shares of 2 and 1
        {"as_published": True, "probes": 3},  # every rank walks to every point, or 16-bit weights differ
        {"probes": 1},  # more ranks than probes
    ],
    ids=["one-sided", "in place", "idle"],
)
def test_probes_that_do_not_divide_evenly(pool: Pool, options: dict[str, object]) -> None:
    one = alone("mezo", torch.bfloat16, 1, **options)
    for size in (2, 4):
        outcomes = pool.run(rank_case.by_probes, "mezo", torch.bfloat16, size, size=size, **options)
        assert all(equal(outcome, one) for outcome in outcomes)


def test_a_mesh_of_data_by_probes(pool: Pool) -> None:
    two = alone("mezo", torch.bfloat16, 2, probes=2)
    for names in (("data", "probes"), ("probes", "data")):
        assert all(equal(outcome, two) for outcome in pool.run(rank_case.on_mesh, names, probes=2))
    for words in ("data,probes", "probes, data=2"):
        with_words = pool.run(rank_case.by_default, "mezo", words, probes=2)
        assert len({str(records) for _, records in with_words}) == 1


def test_ranks_average_their_losses_by_default(pool: Pool) -> None:
    four = alone("mezo_bcd_adaptive", torch.float32, 4)
    assert all(equal(outcome, four) for outcome in pool.run(rank_case.by_default, "mezo_bcd_adaptive"))
    for warned in pool.run(rank_case.opted_out):
        assert len(warned) == 1
        assert "parallel=None" in warned[0]


@pytest.mark.parametrize("split", [[[0, 1], [2], [3], [4]], [[0], [], [1, 2, 3, 4], []]], ids=str)
def test_micro_batches_of_different_numbers_and_amounts(pool: Pool, split: list[list[int]]) -> None:
    """The first step has fewer, so that the message grows in the second one."""

    def every(model: torch.nn.Module, step: int) -> list[rank_case.Batch]:
        numbers = itertools.chain.from_iterable(share if step else share[:1] for share in split)
        return [batch(model, step, i, amount=AMOUNTS[(i + step) % 5]) for i in numbers]

    one = trained("mezo_bcd", torch.float32, every)
    assert all(equal(outcome, one) for outcome in pool.run(rank_case.uneven, split))


def test_submitted_steps_send_the_message_from_the_device(pool: Pool) -> None:
    def every(model: torch.nn.Module, step: int) -> list[rank_case.Batch]:
        return [batch(model, step, i, amount=AMOUNTS[(i + step) % 5]) for i in range(4)]

    one = trained("mezo_bcd", torch.bfloat16, every)
    assert all(equal(outcome, one) for outcome in pool.run(rank_case.submitted))


def test_one_small_message_per_step(pool: Pool) -> None:
    """16 bytes per loss and rank at most, one message per step, and no weights."""
    for sent in pool.run(rank_case.messages):
        assert sent[1:] == [[24]] * 2  # an amount and two losses
    for sent in pool.run(rank_case.messages, probes=8, parallel="probes"):
        assert sent[1:] == [[40]] * 2  # an amount and the four losses of two probes


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"seed": 3}, "the same seed: ranks 0, 1, 3 have 0, rank 2 has 3"),
        ({"shift": 1e-6}, "the same weights: ranks 0, 1, 3 have .*; load the same base weights"),
        ({"lr": 2e-3}, "the same lr"),
        ({"method": "zo_sign"}, "the same rule"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_refused_before_the_first_step(pool: Pool, odd: dict[str, object], words: str) -> None:
    for outcome in pool.outcomes(rank_case.odd_one, **odd):
        assert isinstance(outcome, Failure)
        with pytest.raises(zb.ZeroBlockError, match=words):
            raise zb.ZeroBlockError(outcome.message)


def test_a_changed_bit_is_noticed_and_its_rank_named(pool: Pool) -> None:
    assert pool.run(rank_case.flipped, every=100) == [8] * 4  # nobody looks
    for outcome in pool.outcomes(rank_case.flipped, every=4):
        assert "after 4 steps: ranks 0, 2, 3 have" in outcome.message
        assert "rank 1 has" in outcome.message


@pytest.mark.parametrize("error", ["error", "interrupt"])
def test_an_error_on_one_rank_ends_the_step_on_all(pool: Pool, error: str) -> None:
    four = alone("mezo_bcd", torch.float32, 4)
    for rank, (message, outcome) in enumerate(pool.run(rank_case.stumbling, error)):
        kind = {"error": "ValueError", "interrupt": "KeyboardInterrupt"}[error]
        told = f"{kind}: it tripped"
        assert message == told if rank == 3 else message.endswith(f"step 2 was not taken, because of rank 3: {told}")
        assert equal(outcome, four)  # and nobody has lost count


def test_a_loss_that_is_not_finite_skips_the_step_on_all(pool: Pool) -> None:
    outcomes = pool.run(rank_case.not_finite)
    assert [record.finite for record in outcomes[0][1]] == [True, False, True]
    assert all(same(weights, outcomes[0][0]) for weights, _ in outcomes)


@pytest.mark.parametrize("on", ["wrapper", "model"])
def test_a_model_in_distributed_data_parallel(pool: Pool, on: str) -> None:
    four = alone("mezo_bcd", torch.float32, 4)
    for outcome, broadcasts in pool.run(rank_case.wrapped, on):
        assert equal(outcome, four)
        assert broadcasts == (0 if on == "wrapper" else 1)  # the first forward pass, where the wrapper is not known


def test_a_run_of_four_ranks_replays_in_one_process(pool: Pool) -> None:
    weights, records = pool.run(rank_case.by_default, "mezo_bcd")[1]
    model = Tiny(depth=1)
    zb.replay(zb.mezo_bcd(model, lr=1.0), records)
    assert same(snapshot(model), weights)


def test_the_forked_engine_on_ranks(pool: Pool) -> None:
    share = [[[0]], [[1], [2]], [[3]], [[0, 2]]]
    one = rank_case.packed([examples for rank in share for examples in rank])
    assert all(equal(outcome, one) for outcome in pool.run(rank_case.packed, share))


@pytest.mark.parametrize(
    ("how", "timeout_s"), [(signal.SIGKILL, None), (signal.SIGSTOP, 3), (signal.SIGSTOP, None)], ids=str
)
def test_a_rank_that_is_gone_is_named(how: int, timeout_s: float | None) -> None:
    """Killed, stopped beyond the group's timeout, or stopped until the user has enough of it."""
    with Pool(3, preload=["rank_warm"]) as pool:
        pool.send(rank_case.dying, how, timeout_s)
        interrupted = how == signal.SIGSTOP and timeout_s is None
        if interrupted:
            pool.wait("second/0", "second/2")
            os.kill(pool.processes[0].pid, signal.SIGINT)
        outcomes = [pool.answer(rank) for rank in (0, 2)]
        pool.processes[1].kill()
    if interrupted:
        assert outcomes.pop(0).kind == "KeyboardInterrupt"
    for outcome in outcomes:
        assert outcome.kind == "ZeroBlockError"
        assert outcome.message.startswith("rank 1 no longer answers")


def test_the_mean_of_micro_batches() -> None:
    values = torch.tensor([[0.1, 1.0], [0.2, 2.0], [0.3, 3.0]], dtype=torch.float64)
    nan = torch.nan
    plain = [(0.1 + 0.2 + 0.3) / 3, 2.0]
    for amounts, expected in [
        ([4.0, 4.0, 4.0], plain),
        ([2.0, nan, 1.0], plain),
        ([2.0, 3.0, 1.0], [(2 * 0.1 + 3 * 0.2 + 0.3) / 6, 11.0 / 6]),
        ([2.0, ABSENT, 1.0], [(2 * 0.1 + 0.3) / 3, 5.0 / 3]),
        ([5.0, ABSENT, 5.0], [(0.1 + 0.3) / 2, 2.0]),
        ([0.0, 0.0, 0.0], plain),
    ]:
        assert mean(values, torch.tensor(amounts, dtype=torch.float64)).tolist() == expected


def test_shares_of_probes() -> None:
    found = shares((0, 0, 0, 1, 1, 2, 2), 2)
    assert found.points == ((0, 1, 2), (3, 4, 5, 6))
    assert found.probes(1) == ((3, 4), (5, 6))
    assert found.width == 4


def test_a_checksum_sees_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        base = torch.arange(37).to(dtype)
        sums = {checksum([base])}
        for place in range(37):
            changed = base.clone()
            changed.view(torch.uint8)[place * base.element_size()] ^= 1
            sums.add(checksum([changed]))
            sums.add(checksum([torch.cat([base[:1], changed])[1:]]))  # no multiple of 8 bytes from the start
        assert len(sums) == 38
    swapped = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert checksum(swapped) != checksum(swapped[::-1])


def test_the_trainer_on_ranks(pool: Pool, tmp_path: Path) -> None:
    """Four ranks with a micro-batch each take the steps of one process with four, and one of them writes."""
    one, _ = rank_case.by_trainer(str(tmp_path / "one"), 4)
    for outcome, journals in pool.run(rank_case.by_trainer, str(tmp_path / "four"), 1):
        assert equal(outcome, one)
        assert journals == ["journal.zbj"]
