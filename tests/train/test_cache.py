"""Models kept from run to run, and parameters that are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_toy import Kill, kept, lines, settings

from toy import snapshot as copy_of
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import read
from zeroblock.model import load
from zeroblock.train import Config, cache, loop, resume, run


@pytest.mark.parametrize("method", ["mezo_bcd", "mezo", "ft"])
def test_what_is_frozen_stays(method: str, llama: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    pattern = "*embed*, *.layers.0.*"
    base = copy_of(load(str(llama), "fp32", "cpu"))
    with cache.caching():  # the second run gets the same model, whole again
        run(settings(llama, data, method=method, freeze=pattern, dtype="fp32"), tmp_path / "frozen")
        moved = {name for name, weight in copy_of(models[-1]).items() if not torch.equal(weight, base[name])}
        run(settings(llama, data, method=method, dtype="fp32", steps=20), tmp_path / "free")
    frozen = {name for name in base if "embed" in name or ".layers.0." in name}
    assert frozen
    assert moved == set(base) - frozen
    assert {name for name, weight in copy_of(models[-1]).items() if not torch.equal(weight, base[name])} == set(base)
    if method == "ft":
        return
    assert set(read(tmp_path / "frozen").header.frozen) == frozen
    config = settings(llama, data, method=method, freeze=pattern, dtype="fp32")
    run(config, tmp_path / "parts", Kill(5))
    resume(tmp_path / "parts")
    assert kept(tmp_path / "parts") == kept(tmp_path / "frozen")


def test_what_a_model_freezes_itself_stays_frozen(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, taken from the cache after a run that froze more, or with a pattern: its own flags hold."""

    def loaded(*arguments: Any, **options: Any) -> Any:
        module = load(*arguments, **options)
        module.model.norm.weight.requires_grad_(False)
        return module

    monkeypatch.setattr(cache.models, "load", loaded)
    plain = Config.of({"model": str(llama), "task": "sst2", "lr": 1e-3, "device": "cpu"})
    with cache.caching():
        for config, frozen in ((plain, 1), (plain.replace(freeze="*embed*"), 2), (plain, 1)):
            flags = [param.requires_grad for param in cache.model(config).parameters()]
            assert flags.count(False) == frozen


def test_a_pattern_that_freezes_nothing_or_all_is_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    for pattern, message in (("*embd*", r"no parameter is called '\*embd\*'"), ("*", "leaves nothing to train")):
        with pytest.raises(ZeroBlockError, match=message):
            run(settings(llama, data, freeze=pattern), tmp_path / "run")
    with pytest.raises(ZeroBlockError, match="nothing to freeze"):
        settings(llama, data, method="zero-shot", lr=None, freeze="*")


def test_a_kept_model_starts_from_its_own_weights(llama: Path, opt: Path, data: Path, tmp_path: Path) -> None:
    """Runs one after another on one loaded model are the runs of fresh ones."""
    configs = [
        settings(llama, data, steps=4),
        settings(llama, data, steps=4, method="ft"),
        settings(llama, data, steps=4, seed=1),
        settings(opt, data, steps=4),
        settings(llama, data, steps=4),
    ]
    fresh = [run(config, tmp_path / f"fresh{i}") for i, config in enumerate(configs)]
    with cache.caching():
        kept_ones = [run(config, tmp_path / f"kept{i}") for i, config in enumerate(configs)]
        first, second = (loop.prepare(config).model for config in (configs[0], configs[2]))
        assert first is second
    for a, b in zip(fresh, kept_ones, strict=True):
        assert lines(a.folder) == lines(b.folder)
        assert (a.folder / "steps.csv").read_text() == (b.folder / "steps.csv").read_text()
    assert loop.prepare(configs[0]).model is not loop.prepare(configs[0]).model
