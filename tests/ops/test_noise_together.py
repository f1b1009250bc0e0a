"""Many tensors in one launch take the bits that each takes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_toy import GPU, weights
from torch import Tensor

from toy import bits
from zeroblock.basis import Basis, Elementwise, Scaled, Site, together
from zeroblock.noise import Distribution, Key, Rounding, SmallMask
from zeroblock.ops.noise import together as launches
from zeroblock.ops.shared import tables
from zeroblock.ops.shared import triton as shared

triton = pytest.importorskip("zeroblock.ops.noise.triton")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KEY = Key(2**63 + 5, 2**31 + 1, 3)
ODD = [1, 3, 8, 513, 40, 1030]
"""Sizes of which the first ends all alignment."""
EVEN = [8, 512, 40, 1024]
Place = tuple[Tensor, Basis]


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tensors go together without a GPU, too; the sizes of the groups that were launched."""
    launched: list[int] = []
    launch = triton.add_noise_together_

    def noted(takers: Any, *args: Any) -> None:
        launched.append(len(takers))
        launch(takers, *args)

    monkeypatch.setattr(launches, "backend", lambda operation, device: triton)
    monkeypatch.setattr(triton, "add_noise_together_", noted)
    monkeypatch.setattr(tables, "_known", type(tables._known)())
    return launched


def places(
    sizes: list[int],
    dtype: torch.dtype,
    *,
    offset: int = 0,
    scale: Callable[[int], float] | None = None,
    distribution: Distribution = Distribution.NORMAL,
    rounding: Rounding = Rounding.STOCHASTIC,
    skip: int = 0,
) -> list[Place]:
    """Tensors one after another in the order of the noise, each from its ``skip``-th element of memory on."""
    found: list[Place] = []
    for i, n in enumerate(sizes):
        param = weights(n + skip, dtype).to(GPU)[skip:]
        param.view(-1)[:1] = -0.0
        basis: Basis = Elementwise(n, Site(offset, distribution, rounding))
        found.append((param, basis if scale is None else Scaled(basis, float(torch.tensor(scale(i))))))
        offset += n
    return found


def alone(some: list[Place]) -> list[Place]:
    return [(param.cpu().clone(), basis) for param, basis in some]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(some, others, strict=True))


CASES = [
    pytest.param(ODD, {"offset": 5}, id="odd"),
    pytest.param(EVEN, {"offset": 16}, id="even"),
    pytest.param(EVEN, {"offset": 2**33 + 8, "skip": 1, "scale": lambda i: 0.37 / (i + 1)}, id="unaligned, scaled"),
    pytest.param(ODD, {"distribution": Distribution.RADEMACHER, "scale": lambda i: 1.1**i}, id="signs, scaled"),
    pytest.param(EVEN, {"rounding": Rounding.NEAREST, "offset": 2**34 - 512}, id="nearest"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "how"), CASES)
def test_copies_made_together(sizes: list[int], how: dict[str, Any], dtype: torch.dtype, joined: list[int]) -> None:
    some = places(sizes, dtype, **how)
    before = [param.clone() for param, _ in some]
    for eps in (1e-3, -0.7):
        pairs = together.mirrored(some, KEY, eps)
        assert joined.pop() > 1
        expected = [basis.mirrored(param, KEY, eps) for param, basis in alone(some)]
        for side in range(2):
            assert equal([pair[side] for pair in pairs], [pair[side] for pair in expected])
        copies = together.perturbed(some, KEY, eps)
        assert joined.pop() > 1
        assert equal(copies, [pair[0] for pair in expected])
        joined.clear()
    assert equal([param for param, _ in some], before)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(copies, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "how"), CASES)
def test_steps_taken_together(sizes: list[int], how: dict[str, Any], dtype: torch.dtype, joined: list[int]) -> None:
    """With coefficients on the host and on the device, one and several, with a clock, and with decay."""
    on_device = [torch.tensor([1e-2], device=GPU), torch.tensor([0.1, 0.0, -0.3], device=GPU)]
    for number, alphas in enumerate([(1 / 3,), (0.1, -0.3, 1e-9), *on_device]):
        some = places(sizes, dtype, **how)
        expected = alone(some)
        decay = 0.9 if number == 1 else 1.0
        numbers = alphas.tolist() if isinstance(alphas, Tensor) else alphas
        for param, basis in expected:
            basis.add_(param, KEY, numbers, decay)
        clocked = KEY.to(step=7, clock=torch.tensor([KEY.step, 4], device=GPU)) if number == 2 else KEY
        together.add_(some, clocked, alphas, [decay] * len(some))
        assert joined
        assert sum(joined) <= len(some)
        joined.clear()
        assert equal([param for param, _ in some], [param for param, _ in expected])


@pytest.mark.parametrize("probes", [1, 2])
def test_a_step_of_zero_changes_not_even_signed_zeros(probes: int, joined: list[int]) -> None:
    for alphas in ([0.0] * probes, torch.zeros(probes, device=GPU), [1e-40] * probes):
        some = places(EVEN, torch.float32, scale=lambda i: 1e-20)
        before = [bits(param).clone() for param, _ in some]
        together.add_(some, KEY, alphas, [1.0] * len(some))
        assert all(torch.equal(bits(param), old) for (param, _), old in zip(some, before, strict=True))
        assert joined == ([4] if isinstance(alphas, Tensor) else [])
        joined.clear()


def test_a_step_too_small_for_fp32_goes_as_it_would_alone(joined: list[int]) -> None:
    some = places(EVEN, torch.float32)
    expected = alone(some)
    for param, basis in expected:
        basis.add_(param, KEY, (1e-60,), 1.0)
    together.add_(some, KEY, (1e-60,), [1.0] * len(some))
    assert equal([param for param, _ in some], [param for param, _ in expected])
    assert joined == []


@pytest.mark.parametrize("groups", [64, 128])
def test_tiles_of_any_size(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SMALL", 0)
    monkeypatch.setattr(shared, "GROUPS", groups)
    some = places([2000, 8, 1024, 1031], torch.float16, offset=2**32 * 4 - 1024)
    expected = [basis.mirrored(param, KEY, 0.1) for param, basis in alone(some)]
    for got, pair in zip(together.mirrored(some, KEY, 0.1), expected, strict=True):
        assert equal(list(got), list(pair))


def test_who_goes_together(monkeypatch: pytest.MonkeyPatch, joined: list[int]) -> None:
    """Tensors of one kind; those that are large, strided, masked, empty or in fp64 go alone, and bits are the same."""
    monkeypatch.setattr(launches, "LARGE", 1024)
    some = places([16, 24, 8, 1032, 0, 64], torch.float16)
    some += places([16, 24], torch.float32, offset=4000) + places([16, 24], torch.float64, offset=5000)
    some += [(weights(48, torch.float16).to(GPU).view(6, 8).t(), Elementwise(48, Site(6000)))]
    some += [(weights(48, torch.float16).to(GPU), Elementwise(48, Site(6048), SmallMask(0.1)))]
    expected = alone(some)
    decays = [0.9 if i == 1 else 1.0 for i in range(len(some))]
    for (param, basis), decay in zip(expected, decays, strict=True):
        basis.add_(param, KEY, (0.1,), decay)
    pairs = [basis.mirrored(param, KEY, 0.1) for param, basis in alone(some)]
    for got, pair in zip(together.mirrored(some, KEY, 0.1), pairs, strict=True):
        assert equal(list(got), list(pair))
    assert sorted(joined) == [2, 4]
    joined.clear()
    together.add_(some, KEY, (0.1,), decays)
    assert sorted(joined) == [2, 3]
    assert equal([param for param, _ in some], [param for param, _ in expected])


def test_more_tensors_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch, joined: list[int]) -> None:
    monkeypatch.setattr(launches, "MOST", 36)
    some = places([8] * 75, torch.float32)
    expected = [basis.mirrored(param, KEY, 0.1) for param, basis in alone(some)]
    for got, pair in zip(together.mirrored(some, KEY, 0.1), expected, strict=True):
        assert equal(list(got), list(pair))
    assert joined == [36, 36, 3]


def test_no_distance_is_the_tensor_itself() -> None:
    some = places(EVEN, torch.float32)
    assert all(copy is param for copy, (param, _) in zip(together.perturbed(some, KEY, 0.0), some, strict=True))


def test_copies_of_a_side_lie_in_one_piece_as_aligned_as_tensors_of_their_own() -> None:
    for dtype in DTYPES:
        copies = together.perturbed(places([8, 1000, 24], dtype), KEY, 0.1)
        first = copies[0].data_ptr()
        assert [copy.data_ptr() - first for copy in copies] == [0, 512, 512 + -(-1000 * dtype.itemsize // 512) * 512]
        assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_a_table_is_made_once_and_is_that_of_its_addresses() -> None:
    some = places(EVEN, torch.float32)
    for eps in (0.1, -0.1):
        together.mirrored(some, KEY, eps)
        together.mirrored(some, KEY.to(step=9), eps)
    assert len(tables._known) == 1
    some[1] = (some[1][0].clone(), some[1][1])
    together.mirrored(some, KEY, 0.1)
    assert len(tables._known) == 2


def test_old_tables_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST", 4)
    some = places(EVEN, torch.float32)
    for eps in range(1, 12):
        together.mirrored(some, KEY, eps / 10)
        assert len(tables._known) <= 4


def test_tensors_that_share_memory_go_one_after_another(joined: list[int]) -> None:
    """Programs of one launch would write over each other's results."""
    some = places(EVEN, torch.bfloat16)
    some.append((some[3][0][64:], Elementwise(960, Site(0))))  # a view of the last one
    together.add_(some, KEY, (0.1,), [1.0] * len(some))
    assert joined == []
    assert launches._apart([launches.Taker(param, None, Rounding.NEAREST) for param, _ in some[:4]])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_a_step_that_diverges_brings_no_warning_of_numpy() -> None:
    ((param, basis),) = places([8], torch.float32)
    draw = basis.elementwise(KEY)
    assert draw is not None
    taker = launches.Taker(param, draw, Rounding.NEAREST)
    assert launches.moved(taker, (1e39,)) is taker


@pytest.mark.gpu
def test_a_table_is_sent_without_waiting_whatever_the_default_device() -> None:
    some, expected = (places(EVEN, torch.bfloat16) for _ in range(2))
    together.add_(expected, KEY, (0.1,), [1.0] * 4)
    tables._known.clear()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with torch.device("cuda"):
            together.add_(some, KEY, (0.1,), [1.0] * 4)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert equal([param for param, _ in some], [param for param, _ in expected])


def test_a_capture_makes_no_table_and_keeps_those_it_reads(monkeypatch: pytest.MonkeyPatch, joined: list[int]) -> None:
    some = places(EVEN, torch.float32)
    expected = [basis.mirrored(param, KEY, 0.1)[0] for param, basis in alone(some)]

    def copies() -> list[int]:
        joined.clear()
        assert equal([pair[0] for pair in together.mirrored(some, KEY, 0.1)], expected)
        return list(joined)

    with monkeypatch.context() as patch:
        patch.setattr(tables, "_capturing", lambda device: True)
        assert copies() == []
    with tables.trial():  # a table in the memory of graphs
        assert copies() == copies() == [4]
        assert not tables._known
    (kept,) = tables._known.values()
    monkeypatch.setattr(tables, "_capturing", lambda device: True)
    assert copies() == []  # a graph of somebody else would not keep it
    reads: list[Tensor] = []
    tables.captured(reads)
    try:
        assert copies() == [4]
    finally:
        tables.captured(None)
    assert [one is kept.numbers for one in reads] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 8, 3])
def test_one_launch_is_many_on_the_gpu(dtype: torch.dtype, offset: int, joined: list[int]) -> None:
    """On sizes of a layer, with those that no interpreter takes, beside the kernel for one tensor on the same GPU."""
    sizes = [768 * 768, 768, 768 * 3072, 3072, 1, 768, 5, 4096, 2**22, 8]
    for distribution, scale in itertools.product(Distribution, (None, lambda i: 0.01 * (i + 1))):
        some = places(sizes, dtype, offset=offset, distribution=distribution, scale=scale)
        pairs = [basis.mirrored(param, KEY, 1e-3) for param, basis in some]
        for got, pair in zip(together.mirrored(some, KEY, 1e-3), pairs, strict=True):
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, pair, strict=True))
        for alphas in ((1e-3,), (1e-3, 0.1), torch.tensor([1e-3], device=GPU), torch.zeros(2, device=GPU)):
            one, other = ([(param.clone(), basis) for param, basis in some] for _ in range(2))
            for param, basis in one:
                basis.add_(param, KEY, alphas, 1.0)
            together.add_(other, KEY, alphas, [1.0] * len(other))
            assert equal([param for param, _ in one], [param for param, _ in other])
    assert max(joined) > 4


@pytest.mark.gpu
def test_a_captured_launch_reads_its_table_after_others_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    some = places(EVEN, torch.bfloat16)
    clock = torch.tensor([3, 0], device=GPU)
    key = KEY.to(clock=clock)
    alphas = torch.tensor([0.1], device=GPU)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # the one that captures
        together.add_(some, key, torch.zeros(1, device=GPU), [1.0] * 4)
    torch.cuda.synchronize()
    expected = alone(some)
    graph, reads = torch.cuda.CUDAGraph(), list[Tensor]()
    with torch.cuda.graph(graph, stream=stream):
        tables.captured(reads)
        together.add_(some, key, alphas, [1.0] * 4)
        tables.captured(None)
    assert len(reads) == 1
    tables._known.clear()
    junk = [torch.full((1 << 12,), 7, device=GPU) for _ in range(64)]
    for step in (3, 8):
        clock[0] = step
        graph.replay()
        for param, basis in expected:
            basis.add_(param, KEY.to(step=step), (float(alphas),), 1.0)
    assert equal([param for param, _ in some], [param for param, _ in expected])
    del junk
