"""Killed in mid-growth and resumed from ordinary state dicts, a run ends as the uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loops import BlindCNN, digits, equal, loader, make, sgd, through_disk, train_epoch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.grower import Grower
from esper.grower.container import CHILD
from esper.leyline import BadValueError, CheckpointError

DATA = digits(400)
VALIDATION = digits(600)[0][400:], digits(600)[1][400:]
STEPS = 8


def run(
    first: int, last: int, saved: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[str], dict[str, Tensor]]:
    """Epochs `first` to `last`, from a saved state if there is one."""
    model, optimizer, grower = make(steps=STEPS, budget=3000)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    lines = []
    for epoch in range(first, last):
        train_epoch(model, optimizer, DATA, epoch)
        lines.append(str(grower.step(loader(VALIDATION))))
    state = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return state, lines, dict(model.state_dict())


@pytest.mark.parametrize("cut", [1, 2, 4, 6])
def test_resumed_to_the_bit(cut: int) -> None:
    """Weights, structure, decisions: all as if nothing had happened."""
    _, whole, wanted = run(0, STEPS)
    saved, begun, _ = run(0, cut)
    _, rest, found = run(cut, STEPS, saved)
    assert begun + rest == whole
    assert any("germinated" in line for line in begun)
    assert equal(wanted.items(), found.items())


def run_with_tools(first: int, last: int, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same with fused AdamW, one cycle, a scaler, clipping and an average, each with its own state dict."""
    torch.manual_seed(0)
    model = BlindCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    grower = Grower(model, optimizer, budget=3000, steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": OneCycleLR(optimizer, 0.02, total_steps=4 * STEPS + 1),
        "scaler": scaler,
        "average": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    }
    for name, part in parts.items():
        if saved is not None:
            part.load_state_dict(saved[name])
    for epoch in range(first, last):
        model.train()
        for batch in torch.randperm(400, generator=torch.Generator().manual_seed(epoch)).split(100):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(DATA[0][batch]), DATA[1][batch])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            parts["schedule"].step()
            parts["average"].update_parameters(model)
        grower.step(loader(VALIDATION))
    return through_disk({name: part.state_dict() for name, part in parts.items()})


def test_resumed_to_the_bit_with_everything_around() -> None:
    """Mixed precision, a fused optimizer and an average resume too."""
    wanted, found = run_with_tools(0, STEPS), run_with_tools(3, STEPS, run_with_tools(0, 3))
    for name in ("model", "average"):
        assert any(CHILD in key for key in wanted[name])
        assert equal(wanted[name].items(), found[name].items())
    assert str(wanted["optimizer"]) == str(found["optimizer"]) and wanted["scaler"] == found["scaler"]


def run_scheduled(
    first: int, last: int, saved: dict[str, Any] | None = None, *, grower_first: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same with a group for seeds, and a scheduler that is built before or after the Grower."""
    torch.manual_seed(0)
    model = BlindCNN()
    optimizer = sgd(model)
    scheduler = None if grower_first else CosineAnnealingLR(optimizer, STEPS, eta_min=1e-3)
    options: dict[str, Any] = {"seed_options": {"lr": 0.02, "weight_decay": 0.01}, "scheduler": scheduler}
    grower = Grower(model, optimizer, budget=3000, steps=STEPS, **options)
    scheduler = scheduler or CosineAnnealingLR(optimizer, STEPS, eta_min=1e-3)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    for epoch in range(first, last):
        train_epoch(model, optimizer, DATA, epoch)
        scheduler.step()
        grower.step(loader(VALIDATION))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = through_disk({name: part.state_dict() for name, part in parts.items()})
    return state, dict(model.state_dict())


@pytest.mark.parametrize("grower_first", [False, True])
@pytest.mark.parametrize("cut", [1, 4])
def test_resumed_to_the_bit_with_a_group_for_seeds(cut: int, grower_first: bool) -> None:
    """Weights, and the rates of the seeds."""
    ended, wanted = run_scheduled(0, STEPS, grower_first=grower_first)
    saved, _ = run_scheduled(0, cut, grower_first=grower_first)
    resumed, found = run_scheduled(cut, STEPS, saved, grower_first=grower_first)
    own, seeds = saved["optimizer"]["param_groups"]
    assert seeds["params"] and seeds["lr"] / own["lr"] == pytest.approx(0.4, rel=0.1)
    assert equal(wanted.items(), found.items())
    assert resumed["optimizer"]["param_groups"] == ended["optimizer"]["param_groups"]
    assert resumed["scheduler"] == ended["scheduler"]


def test_another_number_of_groups() -> None:
    """The error names the option that adds one."""
    saved, _ = run_scheduled(0, 1, grower_first=True)
    _model, optimizer, _ = make(steps=STEPS, budget=3000)
    with pytest.raises(BadValueError, match="2 groups, the optimizer has 1: build the Grower with seed_options as it"):
        optimizer.load_state_dict(saved["optimizer"])


def test_the_optimizer_comes_second() -> None:
    """Without its seeds the optimizer has other groups; the error says what to do."""
    saved, *_ = run(0, 2)
    _model, optimizer, _ = make(steps=STEPS, budget=3000)
    with pytest.raises(BadValueError, match="load the model's state dict first"):
        optimizer.load_state_dict(saved["optimizer"])


def test_other_slots_are_refused() -> None:
    """And the model stays as it is."""
    saved, *_ = run(0, 2)
    model, optimizer, _ = make(slots={"stage1": 8})
    train_epoch(model, optimizer, DATA)
    with pytest.raises(CheckpointError, match="build the Grower with the same slots"):
        model.load_state_dict(saved["model"])
    assert not getattr(model, CHILD).live()


def test_structure_is_one_tensor_of_bytes(tmp_path: Path) -> None:
    """So safetensors takes a model that grows."""
    saved, *_ = run(0, 2)
    structure = saved["model"][f"{CHILD}._extra_state"]
    assert structure.dtype == torch.uint8 and structure.dim() == 1
    save_file(saved["model"], tmp_path / "model.safetensors")
    _, rest, wanted = run(2, STEPS, through_disk(saved))  # torch trains on with the tensors that it loads
    _, again, found = run(2, STEPS, saved | {"model": load_file(tmp_path / "model.safetensors")})
    assert again == rest and equal(wanted.items(), found.items())


def test_the_growers_own_state_dict() -> None:
    """It holds the structure: which seeds are where, their stages and the step, but no weights."""
    model, optimizer, grower = make(steps=STEPS, budget=3000)
    train_epoch(model, optimizer, DATA)
    grower.step(loader(VALIDATION))
    other, own, resumed = make(steps=STEPS, budget=3000)
    resumed.load_state_dict(through_disk(grower.state_dict()))
    assert resumed.report().slots == grower.report().slots and resumed.report().step == 1
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert len(own.param_groups[0]["params"]) == len(list(other.parameters()))


def test_damaged_structure_is_refused() -> None:
    """Bytes that are no structure."""
    saved, *_ = run(0, 2)
    model, *_ = make()
    saved["model"][f"{CHILD}._extra_state"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with pytest.raises(CheckpointError):
        model.load_state_dict(saved["model"])
