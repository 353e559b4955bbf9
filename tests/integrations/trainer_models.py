"""A small GPT-2 on text, its Trainer, and a run that can be cut."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from esper.integrations.transformers import GrowCallback

TEXT = Path(__file__).read_bytes()
LENGTH = 16
EPOCHS = 8


def samples(first: int, last: int) -> list[dict[str, torch.Tensor]]:
    """Bytes of this file, modulo 32; the labels of the first tokens do not count."""
    found = []
    for start in range(first, last):
        tokens = torch.tensor([byte % 32 for byte in TEXT[start * LENGTH : (start + 1) * LENGTH]])
        labels = tokens.clone()
        labels[:3] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def gpt() -> GPT2LMHeadModel:
    """Two blocks of width 16, built without a download."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.1,
        )
    )  # fmt: skip


def trainer(folder: Path, *callbacks: TrainerCallback, model: Any = None, **options: Any) -> Trainer:
    """A quiet Trainer on the CPU that evaluates and saves every epoch. (Any: a model, and options of transformers)"""
    settings: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "seed": 3,
        **options,
    }
    return Trainer(
        model=gpt() if model is None else model,
        args=TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=samples(0, 48),
        eval_dataset=samples(48, 72),
        callbacks=list(callbacks),
    )


def grow(trained: Trainer, **options: Any) -> GrowCallback:
    """Add the callback of these tests."""
    settings: dict[str, Any] = {"budget": 4000, "finish": False, **options}
    callback = GrowCallback(trained, **settings)
    trained.add_callback(callback)
    return callback
