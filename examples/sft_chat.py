"""TRL's SFTTrainer on chats without a backward pass: only the assistant's turns carry loss, on packed rows.

python examples/sft_chat.py
"""

import tempfile

import datasets
import tokenizers
import torch
import transformers
from trl import SFTConfig, SFTTrainer

import zeroblock as zb

WORDS = ["<pad>", "<eos>", "user", "assistant", "red", "green", "blue", "sky", "grass", "rose", "is", "what"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} "
    "{{ eos_token }} {% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)
COLOURS = {"sky": "blue", "grass": "green", "rose": "red"}


class ZOSFTTrainer(zb.integrations.ZeroOrderMixin, SFTTrainer):
    """SFTTrainer, with steps that need forward passes only."""


def chat(*things: str) -> dict[str, list[dict[str, str]]]:
    """A question about each thing, with its answer."""
    pairs = [(("user", f"what is {thing}"), ("assistant", COLOURS[thing])) for thing in things]
    return {"messages": [{"role": role, "content": content} for pair in pairs for role, content in pair]}


def main(folder: str) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(WORDS, range(12), strict=True)), "<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    rows = [chat("sky", "grass"), chat("rose"), chat("grass", "rose", "sky"), chat("sky")]
    args = SFTConfig(
        folder, max_steps=60, per_device_train_batch_size=4, learning_rate=2e-2, assistant_only_loss=True,
        logging_steps=20, bf16=False, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = ZOSFTTrainer(
        model=transformers.LlamaForCausalLM(config), args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, method="mezo_bcd", method_kwargs={"eps": 1e-2, "clip": 5.0},
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]  # of 20 steps each
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
