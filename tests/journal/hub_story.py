"""A story with the hub, in a process of its own because huggingface_hub reads HF_ENDPOINT when it is imported.

Train from a base on the hub, push the model and the journal, load both again, and compare the weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

import zeroblock as zb
from zeroblock.cli import app


def call(*words: object) -> None:
    app([str(word) for word in words], standalone_mode=False)


def main(data: Path, out: Path) -> None:
    torch.set_num_threads(1)
    options = ["--data", data, "--device", "cpu", "--lr", "1e-2", "--steps", 3, "--batch-size", 4, "--quiet"]
    call("train", "--model", "ann/base", "--task", "sst2", *options, "--out", out / "run")
    call("push", out / "run", "ann/tuned", "--private", "--device", "cpu")
    call("push", out / "run", "ann/steps", "--what", "journal")
    call("apply", "ann/steps", "--out", out / "applied", "--device", "cpu")
    pretrained = transformers.AutoModelForCausalLM.from_pretrained
    base = pretrained("ann/base")
    models = {"pushed": pretrained("ann/tuned"), "applied": pretrained(out / "applied")}
    models["loaded"] = zb.load("ann/steps", device="cpu")
    before = {name: param.detach().clone() for name, param in base.named_parameters()}
    zb.load(base, "ann/steps")
    wanted = dict(base.named_parameters())
    found = {
        kind: all(torch.equal(param, wanted[name]) for name, param in model.named_parameters())
        for kind, model in models.items()
    }
    found["moved"] = any(not torch.equal(before[name], param) for name, param in wanted.items())
    pipe = transformers.pipeline("text-generation", model="ann/tuned", device="cpu")
    found["pipeline"] = pipe("1 warm", max_new_tokens=2)[0]["generated_text"].startswith("1 warm")
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
