"""``zeroblock demo``: a real run of a real method, small enough for any machine."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    method: Annotated[str, typer.Option(help="Any method of `zeroblock methods`.")] = "mezo_bcd_adam",
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate.")] = 1e-2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1500,
    seed: Annotated[int, typer.Option(min=0, help="Seed of model, data and noise.")] = 0,
) -> None:
    """Train a small transformer to tell which of two symbols is in the majority, without a gradient."""
    import time

    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from torch import nn

    from ..errors import ZeroBlockError
    from ..method import get

    build = get(method)
    torch.set_num_threads(1)  # the model is too small to share
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(2, 32)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
            )
            self.head = nn.Linear(32, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            h = self.embed(tokens)
            for layer in self.layers:
                h = layer(h)
            return self.head(h.mean(1))  # type: ignore[no-any-return]

    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, 2, (n, 15), generator=generator)
        return tokens, (tokens.sum(1) > 7).long()

    model = Classifier()
    held_out = batch(2000)

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())

    optimizer = build(model, lr=lr, seed=seed)
    console = Console()
    weights = sum(p.numel() for p in model.parameters())
    console.print(f"{method}: {len(optimizer.blocks)} blocks, {weights:,} weights, forward passes only")
    for part, value in optimizer.parts.items():
        console.print(f"  {part:13}{value}", highlight=False)
    before, start = accuracy(), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    smooth = None
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("training", total=steps, loss="")
            for _ in range(steps):
                tokens, labels = batch(32)
                loss = float(
                    optimizer.step(lambda x=tokens, y=labels: nn.functional.cross_entropy(model(x), y))  # type: ignore[misc]
                )
                smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
                progress.update(task, advance=1, loss=f"loss {smooth:.3f}, block {optimizer.record.block}")  # type: ignore[union-attr]
    except KeyboardInterrupt:
        console.print("stopped early; the weights are those of the last whole step")
    seconds = time.perf_counter() - start
    after = accuracy()
    console.print(
        f"held-out accuracy {before:.1%} → {after:.1%} on {len(held_out[1]):,} sequences, "
        f"{optimizer.steps} steps in {seconds:.0f} s",
        highlight=False,
    )
    console.print("Next: zeroblock methods; zeroblock blocks --model opt-1.3b; docs in README.md", highlight=False)
    if not after > before:
        raise ZeroBlockError("the run did not improve; try another --lr or more --steps")
