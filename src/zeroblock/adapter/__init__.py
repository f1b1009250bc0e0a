"""Adapters: small tensors that PEFT adds to a frozen model, and that a run trains in its place."""

from .folder import CONFIG, START, base_of, describe, is_adapted, is_folder, keep, load, restart_, save, virtual_tokens
from .spec import Adapter, Lora, Prefix, recorded

__all__ = [
    "CONFIG",
    "START",
    "Adapter",
    "Lora",
    "Prefix",
    "base_of",
    "describe",
    "is_adapted",
    "is_folder",
    "keep",
    "load",
    "recorded",
    "restart_",
    "save",
    "virtual_tokens",
]
