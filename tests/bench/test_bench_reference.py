"""The published procedures: their loss, coefficient and passes against slow ones written out by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from bench_model import ANSWER, RAGGED, SINGLE, build
from torch import Tensor, nn

import zeroblock as zb
from zeroblock.bench.batch import Batch
from zeroblock.bench.reference import REFERENCES, MeZO, Rows, loss

EPS = 1e-2


def log_probs(model: nn.Module, context: tuple[int, ...], option: tuple[int, ...]) -> Tensor:
    """Of an option's tokens, from one string without padding."""
    string = torch.tensor([context + option])
    logits = model(input_ids=string).logits[0].double().log_softmax(-1)
    return logits[torch.arange(len(context) - 1, len(context) + len(option) - 1), string[0, len(context) :]]


@torch.no_grad()
def slow_loss(model: nn.Module, batch: Batch) -> float:
    """One option at a time."""
    if batch.over == "answer":
        every = [log_probs(model, e.context, e.options[k]) for e, k in zip(batch.encoded, batch.labels, strict=True)]
        return float(-torch.cat(every).mean())
    losses = []
    for one, label in zip(batch.encoded, batch.labels, strict=True):
        scores = torch.stack([log_probs(model, one.context, option).mean() for option in one.options])
        losses.append(-scores.log_softmax(0)[label])
    return float(torch.stack(losses).mean())


def noise(name: str, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """z of a procedure's first step, drawn in the order of its code."""
    generator = torch.Generator().manual_seed(int(np.random.RandomState(seed).randint(1_000_000_000)))

    def gauss(*shape: int) -> Tensor:
        return torch.normal(0.0, 1.0, shape, generator=generator)

    params = dict(model.named_parameters())
    if name == "mezo_bcd-reference":
        blocks = zb.layers(model)
        params = {n: params[n] for n in blocks[zb.Shuffled().pick(0, len(blocks), seed, [0.0] * len(blocks))].params}
    found = {}
    for key, param in params.items():
        if name == "lozo-reference" and param.dim() == 2:
            v, u = gauss(param.shape[1], 2), gauss(param.shape[0], 2)
            found[key] = u @ v.T
        else:
            found[key] = gauss(*param.shape)
        if name == "sparse_mezo-reference":
            sizes = param.detach().abs().flatten().sort().values
            found[key] *= param.detach().abs() <= sizes[round(0.75 * len(sizes)) - 1]
    return found


def moved(model: nn.Module, z: dict[str, Tensor], scale: float) -> nn.Module:
    other = copy.deepcopy(model)
    for name, param in other.named_parameters():
        if name in z:
            param.data += scale * z[name]
    return other


@pytest.mark.parametrize("batch", [SINGLE, RAGGED, ANSWER], ids=["single", "ragged", "answer"])
@pytest.mark.parametrize("name", ["OPT", "Llama"])
def test_loss_is_that_of_one_option_at_a_time(name: str, batch: Batch) -> None:
    model = build(name)
    with torch.inference_mode():
        found = float(loss(model, Rows.of(batch, 1)))
    assert found == pytest.approx(slow_loss(model, batch), abs=2e-6)


def test_rows_are_padded_on_the_left_to_a_multiple_of_eight() -> None:
    rows = Rows.of(RAGGED, pad=1)
    assert rows.ids.shape == rows.mask.shape == (5, 16)  # the longest string has 15 tokens
    for row, (string, length) in enumerate(RAGGED.rows):
        assert rows.ids[row].tolist() == [1] * (16 - len(string)) + list(string)
        assert rows.mask[row].tolist() == [0] * (16 - len(string)) + [1] * len(string)
        assert rows.lengths[row] == length
    assert rows.labels.tolist() == [2, 2, 2, 1, 1]
    assert rows.counts is not None
    assert rows.counts.tolist() == [3, 3, 3, 2, 2]
    assert Rows.of(ANSWER, pad=1).counts is None
    assert RAGGED.padded == 5 * 16


def test_loss_is_in_the_dtype_of_the_logits() -> None:
    with torch.inference_mode():
        assert loss(build().bfloat16(), Rows.of(SINGLE, 1)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", REFERENCES)
def test_coefficient_is_the_two_sided_difference(name: str) -> None:
    model = build()
    z = noise(name, model, seed=3)
    up, down = (slow_loss(moved(model, z, side), RAGGED) for side in (EPS, -EPS))
    coeff = REFERENCES[name](model, lr=0.0, eps=EPS, seed=3).step(RAGGED)
    assert abs(up - down) > 1e-3
    assert coeff == pytest.approx((up - down) / (2 * EPS), abs=5e-4)


@pytest.mark.parametrize("name", REFERENCES)
def test_weights_return_after_a_step_that_goes_nowhere(name: str) -> None:
    model = build()
    before = copy.deepcopy(model)
    reference = REFERENCES[name](model, lr=0.0, eps=EPS, seed=3)
    for _ in range(2):
        reference.step(SINGLE)
    for param, old in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(param.data, old.data, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["mezo-reference", "sparse_mezo-reference", "mezo_bcd-reference"])
def test_update_is_along_what_was_measured(name: str) -> None:
    model = build()
    before, z = copy.deepcopy(model), noise(name, model, seed=3)
    coeff = REFERENCES[name](model, lr=0.1, eps=EPS, seed=3).step(SINGLE)
    wanted = moved(before, z, -0.1 * coeff)
    for param, right in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(param.data, right.data, rtol=1e-5, atol=1e-5)


def test_lozo_updates_along_another_u_only_where_v_is_drawn() -> None:
    model = build()
    reference = REFERENCES["lozo-reference"](model, lr=0.1, eps=EPS, seed=3)
    name = "model.decoder.embed_tokens.weight"  # the first that is drawn: U is V's draw and a few more
    seeds = np.random.RandomState(3)
    before = reference.params[name].data.clone()
    coeff = reference.step(SINGLE)
    generator = torch.Generator().manual_seed(int(seeds.randint(1_000_000_000)))
    measured = (
        torch.normal(0.0, 1.0, (32, 2), generator=generator),
        torch.normal(0.0, 1.0, (50, 2), generator=generator),
    )
    generator.manual_seed(generator.initial_seed())
    stale = torch.normal(0.0, 1.0, (50, 2), generator=generator)
    step = (reference.params[name].data - before) / (-0.1 * coeff)
    torch.testing.assert_close(step, stale @ measured[0].T, rtol=1e-3, atol=1e-3)

    before = reference.params[name].data.clone()
    coeff = reference.step(SINGLE)
    generator.manual_seed(int(seeds.randint(1_000_000_000)))
    u = torch.normal(0.0, 1.0, (50, 2), generator=generator)
    step = (reference.params[name].data - before) / (-0.1 * coeff)
    torch.testing.assert_close(step, u @ measured[0].T, rtol=1e-3, atol=1e-3)


def test_block_descent_moves_each_block_once_a_cycle() -> None:
    model = build()
    reference = REFERENCES["mezo_bcd-reference"](model, lr=1e-2, eps=EPS)
    assert reference.cycle == 5  # tokens, positions, two layers, the last norm
    seen = []
    for _ in range(reference.cycle):
        before = {n: p.data.clone() for n, p in model.named_parameters()}
        reference.step(SINGLE)
        changed = {n for n, p in model.named_parameters() if not torch.equal(p.data, before[n])}
        seen.append(next(i for i, b in enumerate(zb.layers(model)) if set(b.params) >= changed))
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_a_loss_that_is_not_finite_leaves_the_weights_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    before = copy.deepcopy(model)
    monkeypatch.setattr(MeZO, "forward", lambda self, rows: torch.tensor(torch.nan))
    with pytest.warns(zb.ZeroBlockWarning, match="loss of MeZO is not finite"):
        assert MeZO(model, lr=1.0, eps=EPS).step(SINGLE) == 0.0
    for param, old in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(param.data, old.data, rtol=0, atol=1e-6)


def test_library_and_published_mezo_measure_the_same_function() -> None:
    """Along the library's own direction both give the same two losses: the ratio compares equal work."""
    model = build()
    from zeroblock.engine import Engine

    objective = Engine(model).objective(RAGGED.encoded, RAGGED.labels, RAGGED.over)
    with torch.no_grad():
        assert float(objective()) == pytest.approx(float(MeZO(model, 0.0).forward(Rows.of(RAGGED, 1))), abs=2e-6)
