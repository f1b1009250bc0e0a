"""Fine-tune the text side of a vision-language model with a plain closure, journal it, and replay it to the same bits.

python examples/vision_language.py
"""

import tempfile
from pathlib import Path

import torch
import transformers

import zeroblock as zb
from zeroblock.journal import Header, Journal, read

IMAGE, ASK, DARK, BRIGHT = 3, 4, 5, 6  # tokens: a patch of an image, the question, and the two answers
PATCHES, STEPS = 4, 100


def build() -> tuple[torch.nn.Module, zb.ZeroOrder]:
    """A small LLaVA, the same at every start, and the method on what is trainable of it."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, **shape),
        text_config=transformers.LlamaConfig(vocab_size=16, initializer_range=0.1, **shape),
        image_token_id=IMAGE,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)  # frozen weights belong to no block
    return model, zb.mezo_bcd(model, lr=1e-2, eps=1e-2, probes=2, clip=5.0)


def main(path: Path) -> None:
    model, optimizer = build()
    names = [block.name for block in optimizer.blocks]
    print("blocks:", ", ".join(names))
    assert not any("vision_tower" in name for name in names)

    answers = torch.tensor([DARK, BRIGHT] * 4)
    light = torch.where(answers == BRIGHT, 1.0, -1.0).view(-1, 1, 1, 1)
    pixels = light + 0.3 * torch.randn(len(answers), 3, 8, 8)  # a processor's pixel_values, for a real model
    prompt = torch.tensor([IMAGE] * PATCHES + [ASK]).expand(len(answers), -1)
    tokens = torch.cat([prompt, answers[:, None]], 1)
    labels = torch.cat([torch.full_like(prompt, -100), answers[:, None]], 1)  # the answer alone carries loss
    with Journal.create(path, Header.of(optimizer)) as journal:
        optimizer.listener = journal.append
        for _ in range(STEPS):
            optimizer.step(lambda: model(input_ids=tokens, pixel_values=pixels, labels=labels).loss)
        optimizer.flush()
    contents, (replayed, _) = read(path), build()
    zb.replay(contents.header.rebuild(replayed), contents.records)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), replayed.parameters(), strict=True))
    first, last = contents.records[0].loss, contents.records[-1].loss
    print(f"loss {first:.3f}, after {STEPS} steps {last:.3f}; the journal replays to the same bits")
    assert last < 0.5 * first


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "run.zbj")
