"""What a group of seeds adds, in one CUDA kernel: against the bank's plain way on the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline import BLEND_STYLES
from esper.tolaria import get_task
from esper.tolaria.banks import Bank

pytestmark = pytest.mark.gpu

MEMBERS = 80
INVALID = 7
"""The first of the members that are taken, but only as padding."""
SIDE = 13
CPU = torch.device("cpu")


def bank_on(device: torch.device, styles: tuple[str, ...], width: int = 8) -> Bank:
    """Members with weights away from zero; styles in turn."""
    task = get_task("digits_blind")
    slot = replace(task.slot_config.slots[0], width=width)
    bank = Bank(slot, "conv_light", MEMBERS, task.optimiser, device, torch.float32)
    values = torch.randn(bank.weights.matrix.shape, generator=torch.Generator().manual_seed(3)) / 2
    bank.weights.matrix.copy_(values)
    bank.styles = frozenset(styles)
    numbers = [BLEND_STYLES.index(styles[member % len(styles)]) for member in range(MEMBERS)]
    bank.style.copy_(torch.tensor(numbers))
    return bank


def stream(bank: Bank, entries: int) -> Tensor:
    """(E, B, C, H, W)."""
    return torch.randn(entries, 3, bank.slot.width, SIDE, SIDE, generator=torch.Generator().manual_seed(4))


def outcome(device: torch.device, styles: tuple[str, ...], width: int) -> list[Tensor]:
    """Effect, and gradients of stream and weights."""
    bank = bank_on(device, styles, width)
    h = stream(bank, MEMBERS).to(device).requires_grad_()
    members = torch.arange(MEMBERS, device=device)
    valid = members < INVALID
    strength = torch.linspace(0.1, 1.0, MEMBERS, device=device).where(valid, 0.0)  # as in every plan
    effect = bank.effect(h, members, strength, valid, valid)
    factors = torch.linspace(-1, 1, effect.numel()).view(effect.shape).to(device)
    (effect * factors).sum().backward()
    assert h.grad is not None
    return [tensor.detach().cpu() for tensor in (effect, h.grad, bank.weights.gradient())]


@pytest.mark.parametrize("width", [6, 8, 32])
@pytest.mark.parametrize("styles", [("add",), ("multiply",), ("gate",), BLEND_STYLES])
def test_equals_the_plain_way(styles: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every style alone, and all of them in one group: several blocks of entries and of pixels, widths that are powers
    of two or not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    mine, expected = outcome(torch.device("cuda"), styles, width), outcome(CPU, styles, width)
    for found, wanted in zip(mine, expected, strict=True):
        assert float((found - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    assert mine[0][INVALID:].eq(0).all(), "padding adds nothing"
    assert mine[2][INVALID:].eq(0).all(), "and learns nothing"


def test_padding_may_compute_anything() -> None:
    """Weights that are not finite, in a member that is only padding, show in no effect and in nobody's gradient."""
    bank = bank_on(torch.device("cuda"), ("add", "multiply", "gate"))
    bank.weights.matrix[8] = torch.nan
    h = stream(bank, 2).cuda().requires_grad_()
    members, valid = torch.tensor([1, 8], device="cuda"), torch.tensor([True, False], device="cuda")
    effect = bank.effect(h, members, torch.ones(2, device="cuda"), valid, valid)
    effect.sum().backward()
    assert effect.isfinite().all()
    assert h.grad is not None
    assert h.grad[0].isfinite().all()
    assert bank.weights.gradient()[[0, 2, 8]].eq(0).all()
