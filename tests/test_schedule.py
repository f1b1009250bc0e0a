"""Orders: exact where they are exact, fair where they are random."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroblock.errors import ZeroBlockError
from zeroblock.schedule import SCHEDULES, Adaptive, Ascending, Descending, FlipFlop, Shuffled, Uniform, by_name


def run(schedule, n: int, turns: int, seed: int = 0, scores: list[float] | None = None) -> list[int]:
    return [schedule.pick(t, n, seed, scores or [0.0] * n) for t in range(turns)]


def test_the_fixed_orders() -> None:
    assert run(Ascending(), 3, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert run(Descending(), 3, 7) == [2, 1, 0, 2, 1, 0, 2]
    assert run(FlipFlop(), 5, 20) == [0, 1, 2, 3, 4, 3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 1, 0, 1, 2, 3]


@given(n=st.integers(1, 40))
def test_flip_flop_is_the_papers_formula(n: int) -> None:
    for t in range(1, 4 * n):
        want = 1 if n == 1 else n - abs((t - 1) % (2 * n - 2) - (n - 1))
        assert FlipFlop().pick(t - 1, n, 0, []) + 1 == want


@given(n=st.integers(1, 30), seed=st.integers(0, 2**64 - 1), cycle=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_shuffled_visits_every_block_once_a_cycle(n: int, seed: int, cycle: int) -> None:
    picks = [Shuffled().pick(cycle * n + i, n, seed, []) for i in range(n)]
    assert sorted(picks) == list(range(n))


def test_cycles_and_seeds_differ() -> None:
    orders = {tuple(Shuffled().pick(c * 8 + i, 8, seed, []) for i in range(8)) for c in range(30) for seed in range(3)}
    assert len(orders) == 90


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_block(name: str) -> None:
    assert run(by_name(name), 1, 30) == [0] * 30


def test_uniform_is_fair() -> None:
    counts = Counter(run(Uniform(), 5, 10_000, seed=1))
    assert set(counts) == set(range(5))
    assert max(abs(c - 2000) for c in counts.values()) < 5 * math.sqrt(10_000 * 0.2 * 0.8)


def test_adaptive_follows_its_probabilities() -> None:
    schedule, scores = Adaptive(temperature=0.5), [0.0, 1.0, 0.5, -1.0]
    p = schedule.probabilities(scores)
    weights = [math.exp(s / 0.5) for s in scores]
    assert p == pytest.approx([w / sum(weights) for w in weights])
    counts = Counter(schedule.pick(t, 4, 3, scores) for t in range(40, 20_040))
    for block in range(4):
        assert abs(counts[block] - 20_000 * p[block]) < 5 * math.sqrt(20_000 * p[block] * (1 - p[block]) + 1)


def test_adaptive_warms_up_for_ten_cycles() -> None:
    extreme = [0.0, 0.0, 1e6]
    assert run(Adaptive(), 3, 30, 7, extreme) == run(Shuffled(), 3, 30, 7)
    assert run(Adaptive(first=Ascending()), 3, 30, 7, extreme) == run(Ascending(), 3, 30)
    assert {Adaptive().pick(t, 3, 7, extreme) for t in range(30, 60)} == {2}
    assert Adaptive(warmup=0).pick(0, 3, 7, extreme) == 2


def test_adaptive_learns_magnitudes_or_signs() -> None:
    magnitude, signed = [0.0, 0.0], [0.0, 0.0]
    for coeffs in ((-2.0,), (4.0, -2.0)):
        Adaptive(decay=0.25).observe(magnitude, 1, coeffs)
        Adaptive(decay=0.25, signed=True).observe(signed, 1, coeffs)
    assert magnitude == [0.0, pytest.approx(0.25 * 3 + 0.75 * 0.5)]
    assert signed == [0.0, pytest.approx(0.25 * 1 + 0.75 * -0.5)]
    untouched = [0.0]
    Shuffled().observe(untouched, 0, (5.0,))
    assert untouched == [0.0]


def test_bad_values_are_refused() -> None:
    with pytest.raises(ZeroBlockError, match=r"decay must be in \(0, 1\]"):
        Adaptive(decay=0)
    with pytest.raises(ZeroBlockError, match="temperature must be positive"):
        Adaptive(temperature=0)
    with pytest.raises(ZeroBlockError, match="did you mean 'flip-flop'"):
        by_name("flipflop")
    assert by_name("random") == Shuffled()
