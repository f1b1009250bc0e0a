"""Packed against one by one, forked against sequential: for every family, every block, every method."""

from __future__ import annotations

import contextlib
import functools
import itertools

import peft
import pytest
import torch
import transformers
from decoder import BATCH, COMMON, CONFIGS, LABELS, decoder, filled
from torch.multiprocessing.reductions import StorageWeakRef

import zeroblock as zb
from toy import same, snapshot
from zeroblock.basis import Elementwise
from zeroblock.engine import Engine
from zeroblock.engine.fork import scratch
from zeroblock.family import ORIGINAL
from zeroblock.task import Encoded


def slow_scores(model, batch: list[Encoded]) -> list[list[float]]:
    """Each option's log-probability: a batch of one, unpadded, all logits."""
    found = []
    for one in batch:
        found.append([])
        for ids, own in one.rows:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].float()
            chosen = logits.log_softmax(-1)[range(len(ids) - own - 1, len(ids) - 1), list(ids[len(ids) - own :])]
            found[-1].append(float(chosen.sum()))
    return found


def slow_loss(found: list[list[float]], batch: list[Encoded], labels: list[int], over: str, reduction: str) -> float:
    """The loss of a batch from the scores that ``slow_scores`` found."""
    if (over, reduction) == ("answer", "tokens"):
        right = [scores[label] for scores, label in zip(found, labels, strict=True)]
        return -sum(right) / sum(len(one.options[label]) for one, label in zip(batch, labels, strict=True))
    losses = []
    for one, scores, label in zip(batch, found, labels, strict=True):
        means = torch.tensor(scores) / torch.tensor([len(option) for option in one.options])
        losses.append(float(-means[label] if over == "answer" else -means.log_softmax(0)[label]))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_scores_are_those_of_each_string_alone(name: str) -> None:
    model = decoder(name)
    slow = slow_scores(model, BATCH)
    for max_tokens in (None, 12, 1):
        engine = Engine(model, max_tokens=max_tokens)
        assert engine.forked, engine.reason
        got = [[score.total for score in scores] for scores in engine.scores(BATCH)]
        torch.testing.assert_close(
            [x for row in got for x in row], [x for row in slow for x in row], rtol=1e-4, atol=1e-4
        )
        for over, reduction in itertools.product(("options", "answer"), ("tokens", "examples")):
            loss = float(engine.objective(BATCH, LABELS, over, reduction)())
            assert loss == pytest.approx(slow_loss(slow, BATCH, LABELS, over, reduction), abs=2e-5)


def both_ways(model, build, steps: int, over: str = "options", batch=BATCH, labels=LABELS, ways: int = 2, **options):
    """Losses of the same steps, forked and, unless ``ways`` is 1, one point after another."""
    engine = Engine(model, **options)
    objective = engine.objective(batch, labels, over)
    before = snapshot(model)
    runs = []
    for closure in (objective, lambda: objective())[:ways]:
        model.load_state_dict(before, strict=False)  # tied weights have one name
        optimizer = build(model)
        records = []
        optimizer.listener = records.append
        for _ in range(steps):
            optimizer.step(closure)
        runs.append((records, snapshot(model)))
    model.load_state_dict(before, strict=False)  # tied weights have one name
    return runs


METHODS = {
    "mezo_bcd": {}, "mezo": {}, "lozo": {}, "sparse_mezo": {"keep": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CONFIGS)
def test_forked_is_sequential_on_every_block(name: str, method: str) -> None:
    model = decoder(name)
    build = functools.partial(zb.METHODS[method], lr=0.0, eps=1e-2, seed=3, **METHODS[method])
    before = snapshot(model)
    blocks = len(build(model).blocks)
    (forked, _), (sequential, _) = both_ways(model, build, blocks)
    assert same(before, snapshot(model))
    assert {record.block for record in forked} == set(range(blocks))
    for one, other in zip(forked, sequential, strict=True):
        assert one.block == other.block
        assert one.losses[0] != one.losses[1]
        assert one.losses == pytest.approx(other.losses, abs=3e-6)


PARTITIONS, SUBSPACES = ["layers:2", "linears", "layers"], [zb.Full(), zb.LowRank(3), zb.Bernoulli(0.3)]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("estimator", [zb.TwoSided(1e-2, probes=3), zb.OneSided(1e-2, probes=2)], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "mixtral"])
def test_other_partitions_probes_and_subspaces(name: str, estimator, number: int) -> None:
    """Every model, partition, estimator and subspace beside every value of the others."""
    from zeroblock.block import by_name

    shift = ["llama-tied", "gpt2", "mixtral"].index(name)
    partition, subspace = PARTITIONS[number], SUBSPACES[(number + shift) % 3]

    def build(model):
        return zb.ZeroOrder(
            model, lr=0.0, partition=by_name(partition), schedule=zb.Ascending(), estimator=estimator, subspace=subspace
        )

    model = decoder(name)
    (forked, _), (sequential, _) = both_ways(model, build, len(build(model).blocks))
    for one, other in zip(forked, sequential, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=3e-6)


TWO, ONE = zb.TwoSided(1e-2, probes=2), zb.OneSided(1e-2)
HELD = [  # both estimators with every model and with either partition
    ("llama-tied", zb.whole, TWO), ("gpt2", zb.whole, ONE), ("mixtral", zb.whole, TWO), ("opt", zb.whole, ONE),
    ("llama-tied", zb.layers, ONE), ("gpt2", zb.layers, TWO), ("mixtral", zb.layers, ONE), ("opt", zb.layers, TWO),
]  # fmt: skip


@pytest.mark.parametrize(("name", "partition", "estimator"), HELD)
def test_steps_that_are_held_are_seen(name: str, partition, estimator) -> None:
    """Within a fold the weights lag behind: both ways measure where the steps have come to."""
    model = decoder(name)
    build = functools.partial(
        zb.ZeroOrder, lr=1e-3, partition=partition, subspace=zb.LowRank(2), interval=4, estimator=estimator
    )
    (forked, end), (sequential, other) = both_ways(model, functools.partial(build, fold=4), 10)
    ((plain, _),) = both_ways(model, build, 10, ways=1)
    for one, two, three in zip(forked, sequential, plain, strict=True):
        assert one.losses == pytest.approx(two.losses, abs=1e-4)
        assert one.losses == pytest.approx(three.losses, abs=1e-4)
    assert max(abs(a.losses[0] - b.losses[0]) for a, b in itertools.pairwise(forked)) > 1e-3
    for name in end:
        torch.testing.assert_close(end[name], other[name], rtol=1e-3, atol=1e-3)


FEW = {"eggroll": {"probes": 2}, "fzoo": {"probes": 3}, "fzoo_bcd": {"probes": 3}, "mezo_greedy": {"probes": 2}}
"""Fewer probes than by default, to save time."""


@pytest.mark.parametrize(
    ("method", "dtype"),
    [(method, torch.float32) for method in sorted(zb.METHODS)]
    + [(method, torch.bfloat16) for method in sorted(zb.METHODS)[::3]],
    ids=str,
)
def test_trajectories(method: str, dtype: torch.dtype) -> None:
    """Two rounds of the blocks; in 16 bits the products round differently, so losses agree to their grid."""
    model = decoder("llama-tied", dtype)
    build = functools.partial(zb.METHODS[method], lr=1e-3, eps=1e-2, seed=1, **FEW.get(method, {}))
    (forked, end), (sequential, other_end) = both_ways(model, build, 10)
    single = dtype == torch.float32
    for one, other in zip(forked, sequential, strict=True):
        assert one.block == other.block
        assert one.losses == pytest.approx(other.losses, abs=1e-4 if single else 0.2)
    if single and method not in ("zo_sign", "mezo_adam", "mezo_bcd_adam"):  # there a sign can turn on a rounding
        for name in end:
            torch.testing.assert_close(end[name], other_end[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["mezo_bcd", "sparse_mezo"])
def test_one_copy_at_a_time_gives_the_same_bits_as_two(method: str, dtype: torch.dtype, monkeypatch) -> None:
    model = decoder("llama-tied", dtype)
    build = functools.partial(zb.METHODS[method], lr=1e-3, eps=1e-2, seed=1)
    ((two, end),) = both_ways(model, build, 12, ways=1)
    monkeypatch.setattr("zeroblock.engine.fork.PAIR_TOKENS", 0)
    ((one, other_end),) = both_ways(model, build, 12, ways=1)
    assert [record.losses for record in one] == [record.losses for record in two]
    assert same(end, other_end)


@pytest.mark.parametrize("method", ["mezo_bcd", "mezo_bcd_adam", "mezo", "sparse_mezo"])
def test_copies_take_the_room_that_is_kept_for_them(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of a layer at a time; one with a rule whose moments are two blocks of 16 bits already."""
    model = decoder("llama-tied", torch.bfloat16)
    engine = Engine(model)
    optimizer = zb.METHODS[method](model, lr=1e-3, **({"interval": 2} if method == "mezo_bcd_adam" else {}))
    made: list[tuple[StorageWeakRef, int]] = []
    most = 0

    def note(*copies: torch.Tensor) -> None:
        nonlocal most
        made.extend((StorageWeakRef(copy.untyped_storage()), copy.nbytes) for copy in copies)
        most = max(most, sum(size for storage, size in made if not storage.expired()))

    perturbed, mirrored = Elementwise.perturbed, Elementwise.mirrored

    def one(self, *args):
        copy = perturbed(self, *args)
        note(copy)
        return copy

    def two(self, *args):
        copies = mirrored(self, *args)
        note(*copies)
        return copies

    monkeypatch.setattr(Elementwise, "perturbed", one)
    monkeypatch.setattr(Elementwise, "mirrored", two)
    objective = engine.objective(BATCH, LABELS)
    for _ in optimizer.blocks * optimizer.interval:
        optimizer.step(objective)
    assert engine.forked
    points = optimizer.plan().points
    blocks = [optimizer.weights.members(block, 0) for block in range(len(optimizer.blocks))]
    assert most == scratch(engine.anatomy, blocks, points, tokens=100)
    layers = zb.mezo_bcd(model, lr=1e-3).blocks
    largest = max(sum(optimizer.params[name].nbytes for name in layer.params) for layer in layers)
    assert most == (1 if optimizer.rule.state else 2) * largest


@pytest.mark.parametrize("max_tokens", [1, 9, 1000])
@pytest.mark.parametrize("over", ["options", "answer"])
def test_rows_that_are_split_give_the_same_losses(max_tokens: int, over: str) -> None:
    model = decoder("opt")
    build = functools.partial(zb.mezo_bcd, lr=0.0, eps=1e-2)
    whole, _ = both_ways(model, build, 6, over, ways=1)[0]
    parts, _ = both_ways(model, build, 6, over, max_tokens=max_tokens, ways=1)[0]
    for one, other in zip(whole, parts, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=2e-6)


SMALL = [
    [Encoded((5,), ((6,),))],
    [Encoded((5, 6), ((7,), (8,)))],
    [Encoded((5,), ((6, 7, 8),)), Encoded((9,), ((3,),))],
]


@pytest.mark.parametrize("batch", SMALL)
def test_small_batches(batch: list[Encoded]) -> None:
    model = decoder("llama")
    build = functools.partial(zb.mezo_bcd, lr=0.0, eps=1e-2)
    (forked, _), (sequential, _) = both_ways(model, build, 6, "answer", batch, [0] * len(batch))
    for one, other in zip(forked, sequential, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=2e-6)


def test_long_rows_run_example_by_example(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroblock.engine import attention

    model = decoder("gemma2")
    engine = Engine(model)
    whole = engine.scores(BATCH)
    monkeypatch.setattr(attention, "DENSE_TOKENS", 4)
    torch.testing.assert_close(
        [s.total for row in engine.scores(BATCH) for s in row],
        [s.total for row in whole for s in row],
        rtol=1e-5,
        atol=0,
    )


def test_adapters() -> None:
    model = peft.get_peft_model(
        decoder("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    build = functools.partial(zb.mezo_bcd, lr=0.0, eps=1e-2)
    (forked, _), (sequential, _) = both_ways(model, build, len(build(model).blocks))
    for one, other in zip(forked, sequential, strict=True):
        assert one.losses[0] != one.losses[1]
        assert one.losses == pytest.approx(other.losses, abs=3e-6)


def test_autocast_is_respected() -> None:
    model = decoder("llama")
    build = functools.partial(zb.mezo_bcd, lr=0.0, eps=1e-1)
    with torch.autocast("cpu", torch.bfloat16):
        (forked, _), (sequential, _) = both_ways(model, build, 5)
    plain, _ = both_ways(model, build, 5, ways=1)[0]
    for one, other, full in zip(forked, sequential, plain, strict=True):
        assert one.losses[0] != one.losses[1]
        assert one.losses == pytest.approx(other.losses, abs=3e-2)
        assert one.losses != full.losses


def test_gradients_flow_for_fine_tuning() -> None:
    model = decoder("opt")
    loss = Engine(model).objective(BATCH, LABELS)()
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.get_input_embeddings().parameters())


def test_dropout_is_off() -> None:
    model = decoder("opt").train()
    optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2)
    objective = Engine(model).objective(BATCH, LABELS)
    optimizer.step(objective)
    first = optimizer.record.losses
    optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2)
    optimizer.step(objective)
    assert optimizer.record.losses == first
    assert model.training


class Scaled(torch.nn.Module):
    """A module with a vector of its own and matrices inside."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, torch.nn.Parameter(torch.full((32,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


@pytest.mark.parametrize("method", METHODS)
def test_a_module_with_a_vector_and_matrices_inside(method: str) -> None:
    model = decoder("llama-tied")
    for layer in model.model.layers:
        layer.mlp = Scaled(layer.mlp)
    build = functools.partial(zb.METHODS[method], lr=0.0, eps=1e-2, seed=3, **METHODS[method])
    (forked, _), (sequential, _) = both_ways(model, build, len(build(model).blocks))
    for one, other in zip(forked, sequential, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=3e-6)


def share_between_layers(model) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def share_a_module(model) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def share_with_the_outside(model) -> None:
    model.model.norm.weight = model.model.layers[0].input_layernorm.weight


@pytest.mark.parametrize("share", [share_between_layers, share_a_module, share_with_the_outside])
@pytest.mark.parametrize("method", ["mezo_bcd", "mezo"])
def test_weights_shared_across_layers_are_measured_one_point_after_another(method: str, share) -> None:
    model = decoder("llama-tied")
    share(model)
    build = functools.partial(zb.METHODS[method], lr=0.0, eps=1e-2, seed=3)
    with pytest.warns(zb.ZeroBlockWarning, match="one point after another: .* is read in several places"):
        (forked, _), (sequential, _) = both_ways(model, build, len(build(model).blocks))
    for one, other in zip(forked, sequential, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=3e-6)


def test_a_layer_that_fails_on_several_points_is_measured_one_after_another() -> None:
    model = decoder("llama-tied")
    engine = Engine(model)
    objective = engine.objective(BATCH, LABELS)
    inner = model.model.layers[1].mlp.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            raise RuntimeError("only one row at a time")
        return inner(x)

    model.model.layers[1].mlp.forward = forward
    found = []
    for closure in (objective, lambda: objective()):
        optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2, schedule=zb.Ascending())
        with contextlib.nullcontext() if found else pytest.warns(zb.ZeroBlockWarning, match="only one row at a time"):
            optimizer.step(closure)
        found.append(optimizer.record.losses)
    assert found[0] == found[1]
    assert not engine.forked


@pytest.mark.parametrize("fork", [True, False])
def test_coefficients_under_autocast(fork: bool) -> None:
    """Its cache of cast weights must not show one point's to the next."""
    model = decoder("llama-tied")
    engine = Engine(model, fork=fork)
    objective = engine.objective(BATCH, LABELS)
    found = []
    for closure in (objective, lambda: objective()):
        optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2)
        records = []
        optimizer.listener = records.append
        with torch.autocast("cpu", torch.bfloat16):
            for _ in optimizer.blocks:
                optimizer.step(closure)
        found.append([record.coeffs[0] for record in records])
    assert found[0] == pytest.approx(found[1], abs=0.6 if fork else 1e-6)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "inside and around the run"])
@pytest.mark.parametrize("method", ["mezo_bcd", "mezo", "lozo"])
def test_an_autocast_inside_the_models_forward_shows_every_point(method: str, around: bool) -> None:
    """As Accelerate's; entering it switches the cache of cast weights on again, in the middle of a forked pass."""
    found = []
    for fork in (True, False):
        model = decoder("llama-tied")
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        options = {"schedule": zb.Ascending()} if method == "mezo_bcd" else {}
        optimizer = zb.METHODS[method](model, 1e-2, eps=0.1, **options)
        with torch.autocast("cpu", torch.bfloat16):  # as ZeroOrderTrainer does, for the tolerance of its first pass
            engine, records = Engine(model, fork=fork), []
        assert engine.forked == fork
        optimizer.listener = records.append
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            for _ in range(2 * len(optimizer.blocks) + 2):
                optimizer.step(engine.objective(BATCH, LABELS))
        found.append([record.losses for record in records])
    assert torch.tensor(found[0]).isclose(torch.tensor(found[1]), rtol=0, atol=0.02).all()
    assert torch.tensor(found[0]).std() > 0.04  # else points that are mixed up would not show


def test_momentum_stays_in_single_precision_under_autocast() -> None:
    """It is carried from one random subspace to the next by a product, which a loop's autocast would round."""
    model, again = decoder("llama"), decoder("llama")
    engine, records = Engine(model), []
    optimizer = zb.lozo_m(model, 1e-3, eps=1e-2, interval=3)
    optimizer.listener = records.append
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(8):
            optimizer.step(engine.objective(BATCH, LABELS))
    zb.replay(zb.lozo_m(again, 1e-3, eps=1e-2, interval=3), records)
    assert same(snapshot(model), snapshot(again))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_an_example_scores_the_same_beside_one_that_scales_the_positions(kind: str) -> None:
    """These models turn all positions of a row by its longest text, once that is longer than in their training."""
    if kind == "longrope":
        rope = {"rope_type": kind, "rope_theta": 1e4, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
        config = transformers.Phi3Config(
            **{**COMMON, "max_position_embeddings": 128}, rope_parameters={**rope, ORIGINAL: 32}, **{ORIGINAL: 32}
        )
    else:
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
        config = transformers.LlamaConfig(**{**COMMON, "max_position_embeddings": 32}, rope_parameters=rope)
    torch.manual_seed(0)
    model = filled(transformers.AutoModelForCausalLM.from_config(config).eval())
    short, long = Encoded((3, 4, 5, 6, 7), ((8, 9, 10), (11, 12))), Encoded((*range(3, 48),), ((8, 9, 10), (11, 12)))
    engine = Engine(model)
    assert engine.forked
    (alone,), (first, _, last) = engine.scores([short]), engine.scores([short, long, short])
    assert [one.total for one in first] == pytest.approx([one.total for one in alone], abs=1e-4)
    assert [one.total for one in last] == pytest.approx([one.total for one in alone], abs=1e-4)
    assert len(engine._rows([short, short, long, short], [0, 0, 0, 0])) == 3


def test_dropout_is_off_whatever_the_mode() -> None:
    config = CONFIGS["opt"]()
    config.dropout = 0.5
    model = transformers.OPTForCausalLM(config)
    engine = Engine(model.eval())
    scores, loss = engine.scores(BATCH), float(engine.objective(BATCH, LABELS)())
    model.train()
    assert engine.scores(BATCH) == scores
    assert float(engine.objective(BATCH, LABELS)()) == loss
    assert model.training


def test_attention_that_counts_places_of_the_row_is_not_packed() -> None:
    mpt = transformers.MptConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=64, max_seq_len=64)
    neo = transformers.GPTNeoConfig(
        hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=2, vocab_size=64,
        window_size=256, max_position_embeddings=512,
    )  # fmt: skip
    for config in (mpt, neo):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.3)
        with pytest.warns(zb.ZeroBlockWarning, match="padded rows"):
            engine = Engine(model)
        batch = [Encoded((3, 4, 5, 6, 7, 11, 12), ((8, 9, 4, 4), (9, 7, 5, 6, 6)))]
        got = [score.total for score in engine.scores(batch)[0]]
        assert got == pytest.approx(slow_scores(model, batch)[0], abs=1e-3)


def test_a_tiny_vocabulary_and_an_example_without_context() -> None:
    config = transformers.LlamaConfig(
        vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    engine = Engine(transformers.LlamaForCausalLM(config).eval())
    assert engine.forked
    with pytest.raises(zb.ZeroBlockError, match="BOS"):
        engine.scores([Encoded((), ((1, 2),))])


def test_a_block_that_is_not_read_has_the_same_loss_at_every_point() -> None:
    model = decoder("llama").requires_grad_(False)
    model.unused = torch.nn.Linear(4, 4)
    model.model.norm.requires_grad_(True)
    parts = [["unused.weight", "unused.bias"], ["model.norm.weight"]]
    build = functools.partial(zb.mezo_bcd, lr=0.0, eps=1e-2, partition=parts, schedule=zb.Ascending(), probes=2)
    with pytest.warns(zb.ZeroBlockWarning, match=r"reads no weight of (the )?block"):
        (forked, _), (sequential, _) = both_ways(model, build, 4)
    for one, other in zip(forked, sequential, strict=True):
        assert len(one.losses) == 4
        assert one.losses == pytest.approx(other.losses, abs=2e-6)
        assert (one.coeffs == (0.0, 0.0)) is (one.block == 0)


class Borrowed(torch.nn.Module):
    """A head that reads another module's weight."""

    def __init__(self, owner: torch.nn.Module) -> None:
        super().__init__()
        vars(self)["owner"] = owner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.owner.weight)


class Careless(torch.nn.Module):
    """A perceptron that reads its parts' weights and does not call them."""

    def __init__(self, old: torch.nn.Module) -> None:
        super().__init__()
        self.up, self.down = old.up_proj, old.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.linear(x, self.up.weight)
        return torch.nn.functional.linear(x.tanh(), weight=self.down.weight)


class Experts(torch.nn.Module):
    """Experts that are called with the tokens that a router sends them, twice: two halves that are not the points'."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(32, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 32)
        chosen, out = self.gate(flat).argmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            out[mine] = expert(flat[mine].repeat(2, 1))[: len(mine)]
        return out.view_as(x)


@pytest.mark.parametrize("subspace", [zb.Full(), zb.LowRank(2)], ids=repr)
@pytest.mark.parametrize("odd", ["head", "perceptron", "experts"])
def test_what_cannot_be_forked_is_not(odd: str, subspace: zb.Full | zb.LowRank) -> None:
    """Weights read where no copy can be shown, rows that are not whole: one point after another, and said."""
    torch.manual_seed(2)
    model = decoder("llama-tied" if odd == "head" else "llama")
    if odd == "head":
        model.lm_head = Borrowed(model.model.embed_tokens)
    else:
        layer = model.model.layers[1]
        layer.mlp = Careless(layer.mlp) if odd == "perceptron" else Experts()
    build = functools.partial(zb.mezo_bcd, lr=0.0, eps=1e-2, subspace=subspace)
    fine = odd != "head" and isinstance(subspace, zb.Full)  # a layer is copied whole
    with contextlib.nullcontext() if fine else pytest.warns(zb.ZeroBlockWarning, match="one point after another"):
        (forked, _), (sequential, _) = both_ways(model, build, 2 * len(build(model).blocks))
    for one, other in zip(forked, sequential, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=5e-6)


def test_an_embedding_that_shortens_its_rows() -> None:
    """Rows of θ + εPz are shortened, which rows of θ with εPz beside them would not be."""
    model = decoder("llama")
    model.model.embed_tokens.max_norm = 0.05
    model.model.embed_tokens(torch.arange(64))  # as any forward does, to the weights themselves
    build = functools.partial(zb.lozo, lr=0.0, eps=1e-2)
    (forked, _), (sequential, _) = both_ways(model, build, 3)
    for one, other in zip(forked, sequential, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=3e-6)


def test_a_window_that_only_the_mask_knows_of() -> None:
    """Examples within it are packed, longer ones padded."""
    sizes = {"num_local_experts": 4, "sliding_window": 40}
    config = transformers.PhimoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.PhimoeForCausalLM(config).eval()
    engine = Engine(model)
    assert engine.packed
    assert engine.max_length == 40
    generator = torch.Generator().manual_seed(5)
    long = Encoded(tuple(torch.randint(3, 60, (100,), generator=generator).tolist()), ((5, 6), (7,)))
    for batch in ([long], [*BATCH[:2], long]):
        got = [score.total for scores in engine.scores(batch) for score in scores]
        expected = [total for totals in slow_scores(model, batch) for total in totals]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with pytest.warns(zb.ZeroBlockWarning, match="longer than the model's window of 40 tokens"):
        zb.mezo_bcd(model, lr=0.0).step(engine.objective([long], [0]))
    assert Engine(decoder("mistral")).max_length == Engine(decoder("llama")).max_length == float("inf")
