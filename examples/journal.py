"""The journal is the checkpoint: record a run, kill it, resume it, and replay it to the same bits.

python examples/journal.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import zeroblock as zb
from zeroblock.journal import Header, Journal, read


def build() -> tuple[nn.Module, zb.ZeroOrder]:
    """The base weights, the same at every start, and the method."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, zb.mezo(model, lr=1e-2, seed=1)


def train(path: Path, steps: int) -> nn.Module:
    """Take the steps that the journal lacks, and append each of them."""
    model, optimizer = build()
    journal = Journal.open(path) if path.exists() else Journal.create(path, Header.of(optimizer))
    zb.replay(optimizer, journal.records)
    print(f"{path.name}: {optimizer.steps} steps replayed")
    inputs = torch.linspace(-1, 1, 512).view(64, 8)
    optimizer.listener = journal.append
    with journal:
        while optimizer.steps < steps:
            optimizer.step(lambda: (model(inputs) - inputs.square().sum(1, keepdim=True)).square().mean())
        optimizer.flush()  # on a GPU the records of the last steps arrive later
    return model


def main(folder: Path) -> None:
    killed, whole = folder / "killed.zbj", folder / "whole.zbj"
    with subprocess.Popen([sys.executable, __file__, str(killed)]) as process:
        while process.poll() is None and not (killed.exists() and len(read(killed).records) > 50):
            time.sleep(0.01)
        process.kill()
    steps = len(read(killed).records) + 50
    resumed, undisturbed = train(killed, steps), train(whole, steps)
    contents, (replayed, _) = read(whole), build()
    zb.replay(contents.header.rebuild(replayed), contents.records)
    for weights in zip(resumed.parameters(), undisturbed.parameters(), replayed.parameters(), strict=True):
        assert all(torch.equal(weights[0], other) for other in weights[1:])
    print(f"three times the same bits after {steps} steps; the journal has {whole.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), steps=10**9)  # until it is killed
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
