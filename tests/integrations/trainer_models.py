"""A small GPT-2 on text, its Trainer, and a run that can be cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from esper.integrations.transformers import GrowCallback

TEXT = Path(__file__).read_bytes()
LENGTH = 16
EPOCHS = 5
CUT = 3


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


def trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    kind: type[Trainer] = Trainer,
    model: nn.Module | None = None,
    model_init: Callable[..., PreTrainedModel] | None = None,
    data: Callable[[int, int], list[dict[str, torch.Tensor]]] = samples,
    **options: Any,
) -> Trainer:
    """A quiet Trainer on the CPU that evaluates and saves every epoch. (Any: options of transformers)"""
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
    return kind(
        model=gpt() if model is None and model_init is None else model,
        model_init=model_init,
        args=TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=data(0, 48),
        eval_dataset=data(48, 72),
        callbacks=list(callbacks),
    )


def grow(trained: Trainer, **options: Any) -> GrowCallback:
    """Add the callback of these tests."""
    settings: dict[str, Any] = {"budget": 4000, "finish": False, **options}
    callback = GrowCallback(trained, **settings)
    trained.add_callback(callback)
    return callback


class Stop(TrainerCallback):
    """Raises in the middle of an epoch, as a crash would."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # Any: as the Trainer calls
        """A third of the epoch was trained."""
        if state.epoch > self.epoch + 0.3:
            raise RuntimeError("stopped")
