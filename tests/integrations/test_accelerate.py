"""Growth in a loop with Accelerate: the plain Grower, built before `prepare` or after it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from loops import BlindCNN, digits, equal
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from esper.grower import Grower

STEPS = 5


def run(
    first: int, last: int, *, after: bool, save: Path, load: Path | None = None, precision: str = "no"
) -> tuple[dict[str, Tensor], Any, list[str]]:
    """Epochs `first` to `last` with accumulation and a schedule. (Any: the prepared optimizer)"""
    torch.manual_seed(0)
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    images, labels = digits(400)
    train = DataLoader(TensorDataset(images[:300], labels[:300]), batch_size=50, shuffle=True)
    val = DataLoader(TensorDataset(images[300:], labels[300:]), batch_size=100)
    model: Any = BlindCNN()  # Any: wrapped below
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    if not after:
        grower = Grower(model, optimizer, budget=3000, steps=STEPS)
    model, optimizer, train, val, schedule = accelerator.prepare(model, optimizer, train, val, schedule)
    if after:
        grower = Grower(model, optimizer, budget=3000, steps=STEPS)
    if load is not None:
        accelerator.load_state(str(load))
    lines = []
    for epoch in range(first, last):
        model.train()
        train.set_epoch(epoch)
        for x, y in train:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        lines.append(str(grower.step(val)))
    accelerator.save_state(str(save))
    return accelerator.unwrap_model(model).state_dict(), optimizer, lines


@pytest.mark.parametrize(("after", "precision"), [(False, "no"), (True, "bf16")])
def test_resumed_to_the_bit(after: bool, precision: str, tmp_path: Path) -> None:
    """`save_state` and `load_state` carry the growth."""
    wanted, optimizer, whole = run(0, STEPS, after=after, save=tmp_path / "whole", precision=precision)
    _, _, begun = run(0, 2, after=after, save=tmp_path / "cut", precision=precision)
    found, again, rest = run(2, STEPS, after=after, save=tmp_path / "end", load=tmp_path / "cut", precision=precision)
    assert begun + rest == whole and "germinated" in whole[0]
    assert equal(wanted.items(), found.items())
    assert str(optimizer.state_dict()) == str(again.state_dict())
