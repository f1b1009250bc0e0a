"""Runs with weights of 8 and 4 bits: resumed, replayed and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loop_toy import Crash, kept, settings

from toy import zeroblock
from zeroblock.errors import ZeroBlockError
from zeroblock.quantise import quantised_layers, values
from zeroblock.train import resume, run


def bytes_of(model: Any) -> list[torch.Tensor]:
    return [param.detach().view(torch.uint8) for param in model.parameters()]


@pytest.mark.parametrize(("weights", "lr"), [("int4", 3e-3), ("int8:scales", 1e-5)])
def test_a_run_resumes_replays_and_is_exported(
    weights: str, lr: float, llama: Path, data: Path, tmp_path: Path, models: list[Any]
) -> None:
    config = settings(llama, data, weights=weights, lr=lr, snapshot_every=4, steps=12)
    run(config, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="a crash"):
        run(config, tmp_path / "parts", Crash(9))
    resume(tmp_path / "parts")
    whole, resumed = models[0], models[-1]
    assert len(quantised_layers(whole)) > 10
    assert all(map(torch.equal, bytes_of(whole), bytes_of(resumed)))
    assert kept(tmp_path / "whole") == kept(tmp_path / "parts")
    done = zeroblock("replay", tmp_path / "whole", "--step", 12, "--out", tmp_path / "tuned")
    assert done.returncode == 0, done.stderr
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").state_dict()
    expected = values(whole)
    assert expected.keys() >= tuned.keys() - {"lm_head.weight"}
    assert all(torch.equal(tuned[name], expected[name]) for name in tuned if name in expected)


def test_what_cannot_work_is_refused_before_anything_is_loaded(llama: Path, data: Path) -> None:
    for changes, message in [
        ({"weights": "int5"}, "unknown way to store weights: 'int5'"),
        ({"weights": "int8", "method": "lozo"}, "low-rank or sparse"),
        ({"weights": "int8", "method": "ft"}, "leave out --weights"),
    ]:
        with pytest.raises(ZeroBlockError, match=message):
            settings(llama, data, **changes)
    settings(llama, data, weights="int4", method="lozo", lora="r=2,targets=q,v")
