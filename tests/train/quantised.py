"""A quantiser of transformers in miniature: int8 matrices with a scale per row, all of them frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "tiny_int8"


class Int8Linear(nn.Linear):
    """y = (scale ∘ weight)x + b, with int8 weights."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(outputs, 1), requires_grad=False)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Round a matrix to 127 steps per row."""
        self.scale.copy_(weight.abs().amax(1, keepdim=True) / 127)
        self.weight.copy_((weight / self.scale).round())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def convert(model: nn.Module) -> None:
    """Replace the matrices of a model's layers, which keep their numbers as well as int8 can."""
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and "layers" in path:
            parent, _, name = path.rpartition(".")
            small = Int8Linear(module.in_features, module.out_features, module.bias is not None)
            if not module.weight.is_meta:
                small.take(module.weight)
                if module.bias is not None:
                    small.bias.data = module.bias.data
            setattr(model.get_submodule(parent), name, small.to(module.weight.device))


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):
    def __init__(self, **options: Any) -> None:
        self.quant_method = METHOD


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        convert(model)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> None: ...

    def is_serializable(self, *given: Any, **options: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def save_quantised(source: Path, folder: Path) -> Path:
    """Quantise a saved model and save it with its tokenizer, so that ``from_pretrained`` loads it as int8."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    convert(model)
    model.config.quantization_config = Int8Config()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
