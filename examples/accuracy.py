"""Optimize accuracy itself. It has no gradient: it counts right answers, and nothing else is asked of an objective.

python examples/accuracy.py
"""

import torch
from torch import nn

import zeroblock as zb


def main() -> None:
    torch.manual_seed(0)
    points = torch.randn(512, 2)
    inside = (points.square().sum(1) < 1.4).long()  # class 1 within a circle
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def accuracy() -> float:
        return float((model(points).argmax(1) == inside).float().mean())

    # A large eps: nearby weights mostly count the same answers, and two equal counts say nothing.
    optimizer = zb.mezo(model, lr=10.0, eps=1.0, probes=8)
    before = accuracy()
    for _ in range(300):
        optimizer.step(lambda: 1 - accuracy())
    print(f"accuracy {before:.3f} before, {accuracy():.3f} after 300 steps")
    assert accuracy() > 0.9


if __name__ == "__main__":
    main()
