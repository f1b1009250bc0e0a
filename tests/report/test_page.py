"""The report of a run: the numbers of its files, labelled, and figures with something on them."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

from zeroblock.report import figure, page
from zeroblock.train.config import Config


def folder(path: Path, method: str = "mezo_bcd", steps: int = 500, blocks: int = 8, spike: bool = False) -> Path:
    """A finished run: a falling loss, a rising metric, the dev-selected step not the best on test."""
    trains = method not in ("zero-shot", "icl")
    config = Config(model="smollm2", task="sst2", method=method, lr=3e-4 if trains else None, steps=steps, seed=3)
    (path / "config.toml").write_text(f"# zeroblock train --config run.toml --out DIR\n{config.dump()}")
    rng = random.Random(0)
    evaluations = range(0, steps + 1, steps // 5) if trains else (0,)
    lines = []
    for i, step in enumerate(evaluations):
        for split, values in (("dev", (0.5, 0.6, 0.7, 0.8, 0.9, 0.85)), ("test", (0.52, 0.6, 0.81, 0.7, 0.79, 0.8))):
            loss = math.exp(-step / steps) if split == "dev" else None
            record = {"kind": "eval", "step": step, "split": split, "metric": "accuracy", "value": values[i]}
            lines.append(json.dumps(record | {"loss": loss, "n": 500, "seconds": 1.0, "elapsed": 2.0}))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    selected = 4 * steps // 5 if trains else 0
    best = 0.81 if trains else 0.52
    summary = {
        "task": "sst2", "method": method, "model": "smollm2", "metric": "accuracy", "steps": steps if trains else 0,
        "seconds": 1234.5, "selected_step": selected, "selected_by": "dev loss", "peak_memory": 3 * 2**29,
        "dev": {"value": 0.9, "loss": 0.4, "n": 500},
        "test": {"selected": 0.79, "best": best, "best_step": 200, "loss": None, "n": 500},
    }  # fmt: skip
    if trains:
        order = [rng.randrange(blocks) for _ in range(steps)]
        losses = [math.exp(-step / steps) + rng.gauss(0, 0.1) for step in range(steps)]
        if spike:
            losses[7], losses[9] = 1e9, math.nan
        rows = [
            f"{step},{block},{loss:.6g},0.0003,0.1"
            for step, (block, loss) in enumerate(zip(order, losses, strict=True))
        ]
        (path / "steps.csv").write_text("\n".join(["step,block,loss,lr,coeff", *rows]) + "\n")
        if method != "ft":
            (path / "journal.zbj").write_bytes(b"x" * 20_480)
            summary |= {"blocks": blocks, "skipped": int(spike)}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def picture(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)[..., :3]


def test_before_after_selected_and_best_are_told_apart(tmp_path):
    page.write_page(folder(tmp_path))
    text = (tmp_path / "summary.md").read_text()
    assert text.splitlines()[0] == "# sst2, mezo_bcd, smollm2"
    assert "    zeroblock train --config run.toml --out DIR" in text
    assert "| accuracy | dev (n = 500) | test (n = 500) |" in text
    assert "| before training | 50.0 % | 52.0 % |" in text
    assert "| **selected by dev loss**: step 400 | 90.0 % | 79.0 % |" in text
    assert "| last step: 500 | 85.0 % | 80.0 % |" in text
    assert re.search(r"best of the evaluations, as the paper reports.*\| 81\.0 % \|", text)
    assert "500 steps: lr 0.0003, batch 16, seed 3, data seed 0" in text
    assert "1,234.5 seconds" in text
    assert "peak memory 1.50 GiB" in text
    assert "[journal.zbj](journal.zbj), 20,480 bytes" in text


def test_skipped_steps_are_told(tmp_path):
    page.write_page(folder(tmp_path, spike=True))
    assert "not finite: 1\n" in (tmp_path / "summary.md").read_text()


def test_every_link_leads_somewhere(tmp_path):
    page.write_page(folder(tmp_path))
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "summary.md").read_text())
    assert {"figures/loss.png", "figures/metric.png", "figures/blocks.png", "journal.zbj"} <= set(links)
    assert all((tmp_path / link).is_file() for link in links)


@pytest.mark.parametrize("name", ["loss", "metric", "blocks"])
def test_figures_are_pictures_of_something(tmp_path, name):
    page.write_page(folder(tmp_path))
    found = picture(tmp_path / "figures" / f"{name}.png")
    assert found.shape[0] >= 500
    assert found.shape[1] == 960
    ink = (found.min(axis=2) < 0.95).mean()
    assert ink > 0.02
    colours = np.unique((found.reshape(-1, 3) * 15).astype(int), axis=0)
    assert len(colours) > 20


def test_the_heat_map_shows_where_the_steps_went(tmp_path):
    """All steps on one block: a bright row in a dark field."""
    path = folder(tmp_path)
    rows = ["step,block,loss,lr,coeff", *(f"{step},5,0.5,0.1,0.1" for step in range(500))]
    (path / "steps.csv").write_text("\n".join(rows))
    page.write_page(path)
    one = picture(path / "figures" / "blocks.png")
    dark = (np.abs(one - np.array([0.267, 0.005, 0.329])).max(axis=2) < 0.02).mean()  # viridis at zero
    bright = (np.abs(one - np.array([0.993, 0.906, 0.144])).max(axis=2) < 0.02).mean()  # and at its top
    assert dark > 5 * bright > 0


def test_a_spike_does_not_flatten_the_curve():
    losses = np.linspace(1.0, 0.4, 500)
    losses[[7, 400]] = 1e9, math.nan
    low, high = figure._view(losses, [0.3, math.nan])
    assert 0.2 < low < 0.3
    assert 1.0 < high < 1.1
    x, y, width = figure._smooth(np.arange(500), losses)
    assert width == 10
    assert y.max() < 1.0
    assert np.allclose(y, np.interp(x, np.arange(500), np.linspace(1.0, 0.4, 500)), atol=0.002)


def test_whole_model_methods_have_no_heat_map_and_backpropagation_no_journal(tmp_path):
    page.write_page(folder(tmp_path, method="ft", blocks=1))
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["loss.png", "metric.png"]
    assert "journal" not in (tmp_path / "summary.md").read_text()


def test_without_training_there_is_one_row_and_no_figure(tmp_path):
    page.write_page(folder(tmp_path, method="zero-shot"))
    text = (tmp_path / "summary.md").read_text()
    assert "| without training | 50.0 % | 52.0 % |" in text
    assert "steps" not in text
    assert not (tmp_path / "figures").exists()


def test_without_matplotlib_the_summary_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    page.write_page(folder(tmp_path))
    assert "No figures: they need `pip install matplotlib`" in (tmp_path / "summary.md").read_text()
