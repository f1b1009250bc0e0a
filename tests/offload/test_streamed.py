"""Streamed weights give the losses and the weights of resident ones, bit for bit."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import transformers
from decoder import BATCH, CONFIGS, LABELS
from torch import nn

import zeroblock as zb
from toy import same, snapshot
from zeroblock import fused
from zeroblock.engine import Engine
from zeroblock.errors import ZeroBlockError
from zeroblock.offload import shelf_of
from zeroblock.offload.lane import Lane
from zeroblock.offload.region import Region
from zeroblock.offload.streamed import Streamed
from zeroblock.quantise import quantise_

LAYERS = 5
Method = Callable[..., zb.ZeroOrder]


def build(kind: str = "opt", dtype: torch.dtype = torch.float32) -> Any:
    config = CONFIGS[kind]()
    config.num_hidden_layers = LAYERS
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def streamed(model: nn.Module, buffers: int = 3) -> Streamed:
    """The model with a shelf of that many buffers, rehearsed on the CPU."""
    zb.shelve(model, "host", device="cpu")
    shelf = shelf_of(model)
    assert isinstance(shelf, Streamed)
    shelf.buffers += [shelf.lane.buffer() for _ in range(buffers - len(shelf.buffers))]
    return shelf


def steps(model: nn.Module, optimizer: zb.ZeroOrder, count: int, fork: bool = True) -> list[zb.Record]:
    records: list[zb.Record] = []
    engine, optimizer.listener = Engine(model, fork=fork), records.append
    for step in range(count):
        optimizer.step(engine.objective(BATCH[step % 2 :], LABELS[step % 2 :]))
    return records


lozo = functools.partial(zb.lozo, interval=4, fold=2)
subtracted = functools.partial(zb.mezo_bcd, restore="subtract")
pairs = functools.partial(zb.mezo_svrg, partition=functools.partial(zb.layers, k=2))


@pytest.mark.parametrize(
    ("kind", "dtype", "method", "fork"),
    [
        ("opt", torch.float32, zb.mezo_bcd, True),
        ("llama-tied", torch.bfloat16, zb.mezo_bcd_adam, False),
        ("opt", torch.bfloat16, zb.mezo, True),
        ("gpt_neox", torch.bfloat16, lozo, True),
        ("gpt2", torch.bfloat16, subtracted, False),
        ("llama-tied", torch.float32, pairs, True),  # blocks of two layers, too many for three buffers
    ],
)
def test_streamed_equals_resident(kind: str, dtype: torch.dtype, method: Method, fork: bool) -> None:
    known, model = build(kind, dtype), build(kind, dtype)
    expected = steps(known, method(known, lr=1e-2), 4, fork)
    shelf = streamed(model)
    optimizer = method(model, lr=1e-2)
    records = steps(model, optimizer, 4, fork)
    assert [(r.losses, r.coeffs) for r in records] == [(r.losses, r.coeffs) for r in expected]
    assert same(snapshot(model), snapshot(known))
    assert not same(snapshot(model), snapshot(build(kind, dtype)))
    rested = [tensor.data_ptr() for layer in shelf.layers for tensor in layer.resting]
    assert [tensor.data_ptr() for layer in shelf.layers for tensor in layer.tensors] == rested
    again = build(kind, dtype)  # the journal's records give the weights, and a state dict goes on from them
    streamed(again)
    rebuilt = method(again, lr=1e-2)
    zb.replay(rebuilt, records[:2])
    resumed = method(again, lr=1e-2)
    resumed.load_state_dict(rebuilt.state_dict())
    zb.replay(resumed, records[2:])
    assert same(snapshot(again), snapshot(known))


def test_all_steps_of_a_layer_are_replayed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    known, model = build(), build()
    for param in (*known.parameters(), *model.parameters()):
        param.requires_grad_(param.dim() < 2)  # the reference of this replay is slow
    records = steps(known, zb.mezo(known, lr=1e-2), 2)
    shelf = streamed(model)
    monkeypatch.setattr(fused, "serves", lambda optimizer: True)  # as on a GPU
    zb.replay(zb.mezo(model, lr=1e-2), records)
    assert same(snapshot(model), snapshot(known))
    vectors = [{n for n, t in enumerate(layer.tensors) if t.requires_grad} for layer in shelf.layers]
    spans = [span for layer, some in zip(shelf.layers, vectors, strict=True) for span in layer.layout.spans(some)]
    assert shelf.lane.bytes_out == sum(stop - start for start, stop in spans)  # once, not per step, and no matrices


def test_a_step_copies_layers_once_and_writes_its_block() -> None:
    model = build()
    shelf = streamed(model)
    layer = shelf.layers[0].layout.nbytes
    engine, optimizer = Engine(model), zb.mezo_bcd(model, lr=1e-2, schedule=zb.Ascending())
    objective = engine.objective(BATCH, LABELS)
    optimizer.step(objective)  # the embedding's turn, then that of the positions
    optimizer.step(objective)
    before = shelf.lane.bytes_in, shelf.lane.bytes_out
    optimizer.step(objective)  # layer 0: the copies that were begun ahead belong to the steps before and after
    assert shelf.lane.bytes_in - before[0] <= (LAYERS + 1) * layer
    written = sum(tensor.nbytes for tensor in shelf.layers[0].tensors)
    assert written <= shelf.lane.bytes_out - before[1] <= layer
    before = shelf.lane.bytes_in, shelf.lane.bytes_out
    engine.scores(BATCH)
    assert (shelf.lane.bytes_in - before[0], shelf.lane.bytes_out - before[1]) == (LAYERS * layer, 0)


def test_more_buffers_keep_layers() -> None:
    moved, expected = [], [Engine(build()).scores(BATCH)] * 2
    for buffers in (2, 4, LAYERS):
        model = build()
        shelf = streamed(model, buffers)
        del shelf.buffers[buffers:]
        engine = Engine(model)
        engine.scores(BATCH)
        before = shelf.lane.bytes_in
        scores = [engine.scores(BATCH) for _ in range(2)]
        moved.append((shelf.lane.bytes_in - before) // shelf.layers[0].layout.nbytes)
        assert scores == expected
    assert moved[0] == 2 * LAYERS
    assert moved[1] <= 2 * 3  # two of five layers stay
    assert moved[2] == 0


def test_what_is_written_at_rest_is_seen() -> None:
    known, model = build(), build()
    streamed(model)
    engine = Engine(model)
    engine.scores(BATCH)  # layers 0 and 1 are on their way for the next pass
    for one in (known, model):
        with torch.no_grad():
            for param in one.model.decoder.layers[0].parameters():
                param.mul_(1.5)
    assert engine.scores(BATCH) == Engine(known).scores(BATCH)


def test_an_optimizer_reads_weights_at_rest_only_if_its_subspace_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    shelf, read = streamed(model), []
    value = shelf.value
    monkeypatch.setattr(shelf, "value", lambda param: read.append(param) or value(param))
    zb.mezo_bcd(model, lr=1e-2)
    assert not read
    zb.mezo_bcd(model)  # in units of the weights
    assert len(read) == len(list(model.parameters()))


def test_interrupted_passes_leave_the_weights() -> None:
    model = build()
    shelf, expected = streamed(model), snapshot(model)
    optimizer, engine = zb.mezo_bcd(model, lr=1e-2), Engine(model)
    inside = model.model.decoder.layers[2].fc1

    def interrupt(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)

    hook = inside.register_forward_pre_hook(interrupt)
    for run in (lambda: optimizer.step(engine.objective(BATCH, LABELS)), lambda: engine.scores(BATCH)):
        with pytest.raises(KeyboardInterrupt):
            run()
        assert same(snapshot(model), expected)
    hook.remove()
    assert engine.scores(BATCH) == Engine(build()).scores(BATCH)
    assert not any(buffer.busy for buffer in shelf.buffers)
    for name in ("bring", "arrive"):  # where a copy is begun, or waited for
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shelf.lane, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.scores(BATCH)
        assert engine.scores(BATCH) == Engine(build()).scores(BATCH)
    hook = inside.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.scores(BATCH)
    zb.unshelve(model)
    at_rest = [tensor.data_ptr() for layer in shelf.layers for tensor in layer.resting]
    assert [tensor.data_ptr() for layer in shelf.layers for tensor in layer.tensors] == at_rest


def test_a_copy_that_is_interrupted_is_waited_for_again() -> None:
    lane, coming = Lane(torch.device("cpu"), 8, pinned=True), Future[None]()
    buffer = lane.buffer()
    buffer.coming, buffer.versions = coming, (1,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coming, "result", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            lane.arrive(buffer)
    assert buffer.coming is coming  # the thread goes on with it
    coming.set_exception(OSError("the disk is gone"))
    with pytest.raises(OSError, match="gone"):
        lane.arrive(buffer)
    assert (buffer.coming, buffer.versions) == (None, ())  # it is copied again


def test_generated_and_saved_as_if_resident(tmp_path: Any) -> None:
    model = build("llama-tied")
    streamed(model)
    steps(model, zb.mezo(model, lr=1e-2), 2)
    model.save_pretrained(tmp_path)
    known = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert same(snapshot(model), snapshot(known))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        texts = [one.generate(ids, max_new_tokens=5, do_sample=False).tolist() for one in (model, known)]
    assert texts[0] == texts[1]
    zb.unshelve(model)
    assert model(ids, labels=ids).loss.requires_grad  # an ordinary model again


def test_quantised_layers_are_streamed() -> None:
    known, model = (quantise_(build("llama-tied"), "int4") for _ in range(2))
    streamed(model)
    losses = [[r.losses for r in steps(one, zb.mezo_bcd(one, lr=1e-2), 3)] for one in (known, model)]
    assert losses[0] == losses[1]
    pairs = zip(known.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_integers_move_by_scales_that_travel_with_them() -> None:
    found = []
    for moves in (quantise_(build("llama-tied"), "int4"), quantise_(build("llama-tied"), "int4")):
        for name, param in moves.named_parameters():
            param.requires_grad_("q_proj.weight" in name)  # a small part of a layer, and not its scales
        if found:
            streamed(moves)
        losses = [record.losses for record in steps(moves, zb.mezo(moves, lr=1e-1), 2)]
        found.append((losses, [value.view(torch.uint8).clone() for value in moves.state_dict().values()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_one_layer_and_a_list_of_embeddings() -> None:
    class Prefixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prefix = nn.ModuleList([nn.Embedding(2, 2)])
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    model = Prefixed()
    shelf = zb.shelve(model, "host", device="cpu", memory="1GB")  # one layer needs one buffer
    assert isinstance(shelf, Streamed)
    assert [layer.module for layer in shelf.layers] == list(model.layers)


def test_only_what_has_another_dtype_is_converted() -> None:
    model = build("opt", torch.bfloat16)
    exact = model.model.decoder.layers[0].fc1.bias
    exact.data = exact.data.float()  # as an adapter's, or what has to stay in fp32
    zb.shelve(model, "host", device="cpu", dtype=torch.bfloat16)
    assert exact.dtype == torch.float32
    model = build()
    model._keep_in_fp32_modules = ["fc1"]
    with pytest.raises(ZeroBlockError, match="as its files have it"):
        zb.shelve(model, "host", device="cpu", dtype=torch.bfloat16)


def test_accelerates_hooks_are_replaced() -> None:
    from accelerate import cpu_offload

    known, model = build(), build()
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(ZeroBlockError, match=r"shelve"):
        zb.mezo_bcd(model, lr=1e-2)
    streamed(model)
    assert Engine(model).scores(BATCH) == Engine(known).scores(BATCH)


def _refusals() -> Sequence[tuple[str, Callable[[Any], object]]]:
    def twice(model: Any) -> None:
        zb.shelve(model, "host", device="cpu")

    def moved(model: Any) -> None:
        model.double()
        Engine(model)

    def subtract(model: Any) -> None:
        zb.mezo(model, lr=1e-2, restore="subtract").step(Engine(model).objective(BATCH, LABELS))

    return [
        ("unshelve", twice),
        ("first change the model", moved),
        ("partition into layers", subtract),
        ("no_grad", lambda model: model(torch.tensor([[3]]))),
        ("hold cannot be combined", lambda model: Engine(model, hold=True)),
    ]


@pytest.mark.parametrize(("words", "run"), _refusals(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_work_says_so(words: str, run: Callable[[Any], object]) -> None:
    model = build()
    streamed(model)
    with pytest.raises(ZeroBlockError, match=words):
        run(model)


def test_models_that_cannot_be_streamed() -> None:
    with pytest.raises(ZeroBlockError, match="did you mean 'host'"):
        zb.shelve(build(), "hots")  # type: ignore[arg-type]
    with pytest.raises(ZeroBlockError, match="give --offload disk"):
        Region.memory(1 << 60)
    with pytest.raises(ZeroBlockError, match="no list of layers"):
        zb.shelve(nn.Linear(2, 2), device="cpu")
    with pytest.raises(ZeroBlockError, match="never called"):
        zb.shelve(nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 2)})])}), device="cpu")
