"""On a GPU: the message of a step is captured with it, or says why not."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import rank_case
import shard_case
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroblock as zb
from toy import same, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A process group of one rank."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "gloo"], indirect=True)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("parallel", ["data", "probes"])
def test_one_rank_on_a_gpu_is_one_process(backend: str, graphs: bool, parallel: str) -> None:
    """Captured with NCCL, on the host with gloo or without graphs; shapes change, so graphs are captured in between."""
    decoder = rank_case.decoders()
    base = decoder.decoder("llama").cuda()
    runs = []
    for option in (None, parallel):
        model = copy.deepcopy(base)
        engine, optimizer = zb.Engine(model, graphs=graphs), zb.mezo_bcd(model, lr=1e-3, parallel=option)
        records: list[zb.Record] = []
        optimizer.listener = records.append
        for step in range(6):
            count = 1 + step % 3
            objective = engine.objective(decoder.BATCH[:count], decoder.LABELS[:count], over="answer")
            if option is not None and backend == "gloo" and graphs and step == 0:
                with pytest.warns(zb.ZeroBlockWarning, match="waits for the host"):
                    optimizer.step(objective)
            else:
                optimizer.step(objective)
        optimizer.flush()
        if option is not None:
            assert optimizer.team.submits == (graphs and backend == "nccl")
        if engine.graphs is not None and (option is None or backend == "nccl"):
            assert not engine.graphs.reason
            assert engine.graphs.captures > 0
        runs.append((snapshot(model), records))
    (alone, told), (shared, heard) = runs
    assert told == heard
    assert same(alone, shared)


@pytest.mark.parametrize("backend", ["nccl"], indirect=True)
def test_a_sharded_model_on_a_gpu_takes_the_steps_of_a_whole_one(backend: str) -> None:
    runs = []
    for sharded in (False, True):
        model = shard_case.Toy(torch.bfloat16, inner=5).cuda()
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        tokens = torch.arange(14, device="cuda").view(2, 7) % shard_case.VOCABULARY
        optimizer = zb.mezo_bcd_adam(model, lr=1e-2, eps=1e-2, interval=2, parallel="data" if sharded else None)

        def loss(model: torch.nn.Module = model, tokens: torch.Tensor = tokens) -> torch.Tensor:
            return model(tokens).float().square().mean()

        losses = [float(optimizer.step(loss)) for _ in range(6)]
        whole = [p.full_tensor() if sharded else p for p in model.parameters()]
        runs.append((losses, [p.detach().cpu() for p in whole]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
