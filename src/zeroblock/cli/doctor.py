"""``zeroblock doctor``: devices, versions, missing packages, and the commands that install them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json as jsonlib
import os
import platform
import shutil
import sys
from typing import Annotated, Any

import typer

REQUIRED = ("torch", "transformers", "numpy", "numba", "safetensors", "typer", "rich")
OPTIONAL = {
    "gguf": ("gguf", "GGUF files as models, smollm2 among them"),
    "peft": ("lora", "LoRA and other adapters"),
    "accelerate": ("trainer", "Hugging Face's Trainer, and loops of Accelerate"),
    "trl": ("trainer", "TRL's trainers"),
    "datasets": ("data", "datasets of the hub, and folders of save_to_disk"),
    "pyarrow": ("data", "Parquet files"),
    "matplotlib": ("figures", "figures as PNG; report.html needs nothing"),
    "pandas": ("lab", "zeroblock lab"),
    "scipy": ("lab", "zeroblock lab"),
    "tensorboard": ("track", "--track tensorboard"),
    "ray": ("ray", "sweeps and races on Ray"),
}
"""Optional packages: the extra that installs each, and the features that need it."""


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Check this machine: devices, versions, what works, what is missing and the command that adds it.

    The exit status is 0 unless zeroblock cannot work here.
    """
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    found["required"] = {name: _version(name) for name in REQUIRED}
    problems = [f"{name} is missing: pip install {name}" for name, version in found["required"].items() if not version]
    found["devices"], notes = _devices(problems)
    found["optional"] = [
        {"package": name, "version": _version(name), "for": purpose, "command": f"pip install 'zeroblock[{extra}]'"}
        for name, (extra, purpose) in OPTIONAL.items()
    ]
    found["smollm2"] = _smollm2()
    found |= {"notes": notes, "problems": problems, "works": not problems}
    if json:
        typer.echo(jsonlib.dumps(found, indent=2))
    else:
        _print(found)
    if problems:
        raise typer.Exit(1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _smollm2() -> str:
    from ..fetch import missing

    return "missing: zeroblock demo fetches it" if missing() else "present"


def _devices(problems: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The devices, each with the time of a real step on it; errors that stop zeroblock are added to ``problems``."""
    notes: list[str] = []
    try:
        import torch

        from ..bench.host import machine
        from ..forecast import free_memory
    except Exception as error:  # a broken installation fails in any way
        problems.append(f"zeroblock cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
        return [], notes
    cpu: dict[str, Any] = {"name": machine("cpu"), "device": "cpu", "cores": os.cpu_count()}
    cpu |= {"free_bytes": free_memory(torch.device("cpu")), "step": _trial("cpu", problems)}
    devices = [cpu]
    triton = _version("triton") or _version("triton-windows")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        one: dict[str, Any] = {"name": about.name, "device": f"cuda:{index}", "total_bytes": about.total_memory}
        one |= {"free_bytes": free_memory(torch.device("cuda", index)), "capability": f"{about.major}.{about.minor}"}
        one |= {"bf16": torch.cuda.is_bf16_supported(including_emulation=False)}
        trouble: list[str] = []
        one["step"] = _trial(f"cuda:{index}", trouble)
        notes += trouble
        devices.append(one)
    if torch.cuda.is_available():
        notes += [] if triton else ["the GPU needs Triton for its kernels: pip install triton"]
        notes.append(f"CUDA {torch.version.cuda}, Triton {triton or 'missing'}")
    elif torch.version.cuda is None and shutil.which("nvidia-smi"):
        notes.append(
            "this machine has an NVIDIA driver, but torch was built without CUDA: see pytorch.org for the wheel"
        )
    else:
        notes.append("no GPU that torch can use; everything works on the CPU")
    return devices, notes


def _trial(device: str, problems: list[str]) -> str:
    """Take a real step of a tiny model; a failure is added to ``problems``."""
    import time

    try:
        from ..method import mezo_bcd, specimen

        model = specimen().to(device)
        optimizer = mezo_bcd(model, lr=1e-3)

        def objective() -> Any:
            return sum(param.square().sum() for param in model.parameters())

        start = time.perf_counter()
        optimizer.step(objective)
        optimizer.flush()
        return f"works ({time.perf_counter() - start:.1f} s for the first step)"
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        problems.append(f"a step on {device} fails ({reason})")
        return f"fails ({reason})"


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from .. import __version__
    from ..report.html import size

    console = Console(highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in found["required"].items() if version)
    console.print(f"[bold]zeroblock {__version__}[/bold], Python {found['python']}, {found['system']}", soft_wrap=True)
    console.print(versions, style="dim", soft_wrap=True)
    console.print()
    for one in found["devices"]:
        free = "" if one["free_bytes"] is None else f", {size(one['free_bytes'])} free"
        sound = one["step"].startswith("works")
        style = "green" if sound else "red"
        console.print(
            f" [{style}]{'✓' if sound else '✗'}[/{style}] {one['device']}: {one['name']}{free}; a step {one['step']}"
        )
    for note in found["notes"]:
        console.print(f"   {note}", style="dim", markup=False, soft_wrap=True)
    console.print()
    sheet = Table.grid(padding=(0, 2))
    for one in found["optional"]:
        if one["version"]:
            sheet.add_row(" [green]✓[/green]", one["package"], one["version"], f"[dim]{one['for']}[/dim]")
        else:
            command = one["command"].replace("[", "\\[")
            sheet.add_row(" [yellow]–[/yellow]", one["package"], "missing", f"{one['for']}: {command}")
    there = found["smollm2"] == "present"
    sheet.add_row(
        " [green]✓[/green]" if there else " [yellow]–[/yellow]",
        "smollm2",
        "present" if there else "missing",
        "[dim]the demo's model[/dim]" if there else "the demo's model: zeroblock demo fetches it",
    )
    console.print(sheet)
    console.print()
    for problem in found["problems"]:
        console.print(f" [red]✗[/red] {problem}", soft_wrap=True)
    if found["works"]:
        console.print(" zeroblock works here. Next: zeroblock demo, or zeroblock plan --model M --task FILE")
    sys.stdout.flush()
