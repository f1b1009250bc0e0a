"""On a GPU: the packed kernel in the model, captured steps, and records that rebuild their weights elsewhere."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import transformers
from decoder import BATCH, CONFIGS, ENCODERS, LABELS, decoder, specimen

import zeroblock as zb
from toy import same, snapshot
from zeroblock.engine import Engine
from zeroblock.task import Encoded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
INTERVAL = {"mezo_bcd_adam": {"interval": 7}, "lozo": {"interval": 8, "fold": 4}}
NOT_CAPTURED = ("mixtral", "qwen3_moe")  # in fp32 they ask the host which tokens go where


@pytest.mark.parametrize("name", [*CONFIGS, *ENCODERS])
def test_scores_agree_with_the_cpu(name: str) -> None:
    model, batch, _ = specimen(name)
    expected = [s.total for row in Engine(model).scores(batch) for s in row]
    got = [s.total for row in Engine(model.cuda(), graphs=False).scores(batch) for s in row]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
def test_gradients_agree_with_the_cpu(name: str) -> None:
    """Of a row so long that the CPU runs it example by example."""
    model = decoder(name).cpu()
    batch, labels = list(BATCH) * 30, list(LABELS) * 30
    found = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(model).to(device)
        model.zero_grad()
        Engine(model).objective(batch, labels)().backward()
        found.append([param.grad.cpu() for param in model.parameters() if param.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["opt", "llama", "gemma2"])
def test_rows_of_one_length_share_their_graphs(name: str) -> None:
    """Whatever number of tokens their examples begin with, and whatever they score."""
    model = decoder(name).cuda()
    questions = [((8, 9), (7, 5)), ((8, 9, 4), (7, 5), (6,)), ((8,), (7,)), ((4, 5, 6, 7, 8, 9),) * 2]
    batches = [
        [Encoded((*range(3, 3 + root), 30 + k, 40, 41), options) for k in range(3)]
        for options in questions
        for root in (0, 1, 5)
    ]
    found = []
    for graphs in (True, False):
        engine = Engine(model, graphs=graphs)
        optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2, schedule=zb.Ascending())
        records = []
        optimizer.listener = records.append
        for batch in batches:
            objective = engine.objective(batch, [0, 1, 0])
            for _ in optimizer.blocks:
                optimizer.step(objective)
        optimizer.flush()
        found.append([record.losses for record in records])
    assert engine.graphs is None
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["mezo_bcd", "mezo", "lozo", "sparse_mezo"])
@pytest.mark.parametrize("name", [*(name for name in CONFIGS if name not in NOT_CAPTURED), *ENCODERS])
def test_captured_is_eager(name: str, method: str) -> None:
    model, batch, labels = specimen(name)
    model.cuda()
    build = functools.partial(zb.METHODS[method], lr=0.0, eps=1e-2, seed=3)
    runs = []
    for graphs in (True, False):
        engine = Engine(model, graphs=graphs)
        optimizer = build(model)
        records = []
        optimizer.listener = records.append
        for _ in range(2 * len(optimizer.blocks)):
            optimizer.step(engine.objective(batch, labels))
        optimizer.flush()
        runs.append(records)
        assert (len(engine.graphs) > 0) if graphs else engine.graphs is None
    for captured, eager in zip(*runs, strict=True):
        assert (captured.step, captured.block) == (eager.step, eager.block)
        assert captured.losses[0] != captured.losses[1]
        assert captured.losses == pytest.approx(eager.losses, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["mezo_bcd", "mezo", "sparse_mezo", "lozo", "mezo_bcd_adaptive", "mezo_bcd_adam"])
def test_records_of_captured_steps_rebuild_the_weights_on_the_cpu(method: str, dtype: torch.dtype) -> None:
    model = decoder("llama-tied", dtype)
    base = copy.deepcopy(model)
    model.cuda()
    engine = Engine(model)
    build = functools.partial(zb.METHODS[method], eps=1e-2, seed=3, clip=2.0, **INTERVAL.get(method, {}))
    optimizer = build(model, lr=1e-3)
    records = []
    optimizer.listener = records.append
    for step in range(42):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + step)
        optimizer.step(engine.objective(BATCH if step % 2 else BATCH[::-1], LABELS if step % 2 else LABELS[::-1]))
    optimizer.flush()
    optimizer.settle()
    assert [record.step for record in records] == list(range(42))
    assert engine.graphs.captures > 0
    assert {abs(record.coeffs[0]) > 2.0 for record in records} == {True, False}
    again = build(base, lr=1e-3)
    zb.replay(again, records)
    again.settle()
    assert same(snapshot(model), snapshot(base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["mezo_bcd", "lozo", "mezo_bcd_adam"])
def test_captured_steps_without_lr_are_rebuilt_on_the_cpu_and_go_on_from_a_state(
    method: str, dtype: torch.dtype
) -> None:
    """The running sizes of the coefficients live on the device, and are the host's to the bit."""
    model = decoder("llama-tied", dtype)
    base = copy.deepcopy(model)
    model.cuda()
    engine, build = Engine(model), functools.partial(zb.METHODS[method], seed=3, steps=40, **INTERVAL.get(method, {}))
    optimizer = build(model)
    records = []
    for step in range(40):
        if step == 21:
            state, optimizer = optimizer.state_dict(), build(model)
            optimizer.load_state_dict(state)
        optimizer.listener = records.append
        optimizer.step(engine.objective(BATCH if step % 2 else BATCH[::-1], LABELS if step % 2 else LABELS[::-1]))
    optimizer.flush()
    optimizer.settle()
    assert engine.graphs.captures > 0
    again = build(base)
    zb.replay(again, records)
    again.settle()
    assert same(snapshot(model), snapshot(base))
    assert again.state_dict().get("table") == optimizer.state_dict().get("table")


@pytest.mark.parametrize("method", ["mezo_bcd", "mezo", "lozo", "mezo_bcd_adam"])
def test_steps_that_are_not_captured_do_not_wait_either(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows too long for capturing to pay, or several of them: nothing in a step asks the device for a number."""
    monkeypatch.setattr("zeroblock.run.graph.MAX_CAPTURED_WORK", 0)
    model = decoder("llama-tied", torch.bfloat16)
    base = copy.deepcopy(model)
    model.cuda()
    engine, split = Engine(model), Engine(model, max_tokens=8)
    build = functools.partial(zb.METHODS[method], lr=1e-3, eps=1e-2, clip=2.0, **INTERVAL.get(method, {}))
    optimizer, records = build(model), []
    optimizer.listener = records.append
    for step in range(32):
        if step == 2 * len(optimizer.blocks):  # the first passes are watched, and kernels compiled
            torch.cuda.set_sync_debug_mode("error")
        optimizer.step((split if step % 3 else engine).objective(BATCH, LABELS))
    torch.cuda.set_sync_debug_mode("default")
    optimizer.flush()
    assert engine.graphs.captures == split.graphs.captures == 0
    assert [record.step for record in records] == list(range(32))
    zb.replay(build(base), records)
    assert same(snapshot(model), snapshot(base))


def test_a_run_with_moments_goes_on_from_its_state() -> None:
    """Stopped within a turn and continued by another optimizer: the moments and their count come along."""
    ends = []
    for stop in (None, 10):
        model = decoder("llama-tied", torch.bfloat16).cuda()
        engine = Engine(model)
        optimizer = zb.mezo_bcd_adam(model, lr=1e-3, eps=1e-2, interval=7)
        for step in range(25):
            if step == stop:
                state = optimizer.state_dict()
                assert {s["t"] for s in state["state"].values()} == {3}
                optimizer = zb.mezo_bcd_adam(model, lr=1e-3, eps=1e-2, interval=7)
                optimizer.load_state_dict(state)
            optimizer.step(engine.objective(BATCH, LABELS))
        optimizer.flush()
        assert engine.graphs.captures > 0
        ends.append(snapshot(model))
    assert same(*ends)


@pytest.mark.parametrize("method", INTERVAL)
def test_a_state_is_loaded_under_captured_steps(method: str) -> None:
    """The graphs stay, and read what was loaded: moments, or steps that are held."""
    model = decoder("llama-tied", torch.bfloat16).cuda()
    engine, optimizer = Engine(model), zb.METHODS[method](model, lr=1e-3, eps=1e-2, **INTERVAL[method])

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.step(engine.objective(BATCH, LABELS))
        optimizer.flush()

    run(10)
    state, weights = copy.deepcopy(optimizer.state_dict()), snapshot(model)
    run(30)
    end, captures = snapshot(model), engine.graphs.captures
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    optimizer.load_state_dict(state)
    run(30)
    assert same(end, snapshot(model))
    assert engine.graphs.captures == captures > 0


@pytest.mark.parametrize("method", ["mezo_bcd", "mezo_bcd_adam", "lozo"])
def test_captured_and_split_batches_take_turns(method: str) -> None:
    """A batch in several rows is not captured; its step comes between captured ones, in order."""
    ends = []
    for graphs in (True, False):
        model = decoder("llama-tied").cuda()
        engine, split = Engine(model, graphs=graphs), Engine(model, graphs=graphs, max_tokens=8)
        optimizer, records = zb.METHODS[method](model, lr=1e-3, eps=1e-2, **INTERVAL.get(method, {})), []
        optimizer.listener = records.append
        for step in range(20):
            optimizer.step((split if step % 4 == 3 else engine).objective(BATCH, LABELS))
        optimizer.flush()
        assert [record.step for record in records] == list(range(20))
        ends.append(records)
    for one, other in zip(*ends, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=1e-3)


def test_one_short_example() -> None:
    model = decoder("llama").cuda()
    engine, optimizer = Engine(model), zb.mezo_bcd(model, lr=1e-3)
    example = Encoded((3,), ((4,), (5,)))
    optimizer.step(engine.objective([example], [0]))
    optimizer.flush()
    assert math.isfinite(optimizer.record.loss)


def test_graphs_and_their_trials_compute_in_one_place() -> None:
    """A pool has room for the largest block's two copies, whichever came first; nothing is held beside it."""
    config = transformers.OPTConfig(
        vocab_size=60_000, hidden_size=256, word_embed_proj_dim=256, ffn_dim=1024, num_hidden_layers=3,
        num_attention_heads=4,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval().cuda()
    engine, optimizer = Engine(model), zb.mezo_bcd(model, lr=0.0, schedule=zb.Descending())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(len(optimizer.blocks)):
        optimizer.step(engine.objective(BATCH, LABELS))
    optimizer.flush()
    largest = max(sum(optimizer.params[name].nbytes for name in block.params) for block in optimizer.blocks)
    assert 2 * largest <= engine.graphs.shared < 2.2 * largest + (64 << 20)
    assert torch.cuda.memory_reserved() - before < engine.graphs.shared + (24 << 20)


def test_the_oldest_graphs_make_room() -> None:
    model = decoder("llama").cuda()
    engine = Engine(model)
    optimizer = zb.mezo_bcd(model, lr=0.0, schedule=zb.Ascending())
    for _ in range(2):
        for _ in range(len(optimizer.blocks)):
            optimizer.step(engine.objective(BATCH, LABELS))
    kept = len(engine.graphs)
    assert kept == engine.graphs.captures
    assert engine.graphs.shared < 64 << 20  # each computes where the last one did
    engine.graphs.most = 1
    longer = [*BATCH, *[Encoded(tuple(range(3, 50)), ((1,), (2,)))] * 3]  # of the next length of captured rows
    optimizer.step(engine.objective(longer, [*LABELS, 0, 0, 0]))
    assert len(engine.graphs) < engine.graphs.captures  # those of the shorter rows are gone
    assert engine.graphs.bytes > 0
    optimizer.step(engine.objective(BATCH, LABELS))
    optimizer.flush()


def test_a_step_without_a_finite_loss_moves_nothing() -> None:
    model = decoder("llama").cuda()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    before = snapshot(model)
    optimizer = zb.mezo_bcd(model, lr=1.0, patience=5)
    with pytest.warns(zb.ZeroBlockWarning, match="padded rows"):
        engine = Engine(model)
    engine.packed = engine.forked = True
    from zeroblock.run.graph import Graphs

    engine.graphs = Graphs()

    def run() -> None:
        for _ in range(100):
            optimizer.step(engine.objective(BATCH, LABELS))
        optimizer.flush()

    with pytest.warns(zb.ZeroBlockWarning, match="not finite"), pytest.raises(zb.ZeroBlockError, match="lower lr"):
        run()
    assert engine.graphs.captures > 0
    assert same(before, snapshot(model))


@pytest.mark.parametrize("method", ["mezo_bcd", "mezo"])
def test_rows_of_several_lengths_share_no_buffer(method: str) -> None:
    """Lengths and blocks in turn: every step reads its own batch, whichever pieces were captured for another."""
    model = decoder("llama-tied", torch.bfloat16).cuda()
    batches = [(BATCH * n, LABELS * n) for n in (1, 6, 3, 10)]
    runs = []
    for graphs in (True, False):
        engine, optimizer, records = Engine(model, graphs=graphs), zb.METHODS[method](model, lr=0.0, eps=1e-2), []
        optimizer.listener = records.append
        for step in range(4 * len(optimizer.blocks) + 8):
            optimizer.step(engine.objective(*batches[step % 4]))
        optimizer.flush()
        runs.append(records)
    for captured, eager in zip(*runs, strict=True):
        assert captured.losses == pytest.approx(eager.losses, abs=2e-2)
        assert captured.coeffs == pytest.approx(eager.coeffs, rel=0.2, abs=1.0)


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_others_say_why_they_are_not_captured(name: str) -> None:
    model = decoder(name).cuda()
    with pytest.warns(zb.ZeroBlockWarning, match=r"not captured as CUDA graphs.*its experts ask the host"):
        engine = Engine(model)
    optimizer = zb.mezo_bcd(model, lr=0.0, eps=1e-2)
    for _ in range(2):
        optimizer.step(engine.objective(BATCH, LABELS))
    optimizer.flush()
    assert engine.graphs.captures == 0
    assert optimizer.record.losses[0] != optimizer.record.losses[1]


def test_captured_steps_count_the_tokens_of_their_own_batch() -> None:
    """Two batches of one shape with different numbers of scored tokens: one graph, each with its own mean."""
    model = decoder("llama").cuda()
    batches = [
        [Encoded((3, 4, 5), ((6, 7, 8, 9, 10),)), Encoded((11, 12), (tuple(range(20, 20 + length)),))]
        for length in (1, 4)
    ]
    runs = []
    for graphs in (True, False):
        engine, optimizer, records = Engine(model, graphs=graphs), zb.mezo(model, lr=0.0, eps=1e-2), []
        optimizer.listener = records.append
        for step in range(6):
            optimizer.step(engine.objective(batches[step % 2], [0, 0], "answer"))
        optimizer.flush()
        runs.append(records)
        assert engine.graphs is None or engine.graphs.captures == 5  # opening, both ends, the layers, update
    for captured, eager in zip(*runs, strict=True):
        assert captured.losses == pytest.approx(eager.losses, abs=1e-5)
