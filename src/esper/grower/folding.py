"""Adapters become part of the weights in front of them: the same modules and names, and no added latency."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from esper.grower.container import ModelSlots
from esper.grower.scoring import eval_mode
from esper.kasmina.slot import Role, SeedSlot
from esper.leyline import BadValueError, EsperError

TOLERANCE = 1e-4  # of the largest output, in float32; a narrower dtype rounds the folded weights themselves
TOLERANCE_NARROW = 3e-2


class FoldError(EsperError, RuntimeError):
    """The folded submodule would not compute what it did with its seed."""


Undo = list[tuple[Tensor, Tensor]]
"""Parameters and their values before"""


def can_fold(slot: SeedSlot) -> bool:
    """Whether the seed can be folded."""
    return slot.folded() is not None


def refuse_unfoldable(slots: ModelSlots, kept: Iterable[str], remedy: str) -> None:
    """Raise if one of these seeds is not linear, and say what else can be done."""
    bent = [f"{slots[slot_id].state.blueprint} behind {slot_id}" for slot_id in kept if not can_fold(slots[slot_id])]
    if bent:
        raise BadValueError(
            f"{', '.join(bent)} cannot be merged: only what is linear folds into the weights in front of it. {remedy}"
        )


@torch.no_grad()
def fold(slots: ModelSlots, kept: Iterable[str]) -> Undo:
    """Fold the seeds of these slots into the weights in front of them. They still act: silence or remove them next."""
    undo: Undo = []
    for slot_id in kept:
        slot = slots[slot_id]
        values = slot.folded()
        assert values is not None and slot.base is not None
        for name, value in values.items():
            parameter = slot.base.get_parameter(name)
            undo.append((parameter, parameter.clone()))
            parameter.copy_(value)
    return undo


@torch.no_grad()
def unfold(undo: Undo) -> None:
    """Put the old values back."""
    for parameter, value in undo:
        parameter.copy_(value)


@torch.no_grad()
def fold_checked(slots: ModelSlots, kept: Iterable[str]) -> None:
    """Fold, and compare each submodule with what it computed with its seed, on random inputs."""
    undo: Undo = []
    for slot_id in kept:
        slot = slots[slot_id]
        assert slot.base is not None
        x = _input_of(slot)
        with eval_mode(slot.base):
            before = slot.base(x)
            undo += fold(slots, [slot_id])
            slot.role = Role.SILENT
            try:
                after = slot.base(x)
            finally:
                slot.role = Role.MAIN
        limit = TOLERANCE if before.dtype in (torch.float32, torch.float64) else TOLERANCE_NARROW
        if bool(((after - before).abs() > limit * before.abs().max()).any()):
            unfold(undo)
            raise FoldError(
                f"{slot_id!r} does not compute the same with its {slot.state.blueprint} seed folded in: a "
                f"{type(slot.base).__name__} uses its weight in its own way; use finish(), or drop= its seed"
            )


def _input_of(slot: SeedSlot) -> Tensor:
    """A random input of the submodule in front of a slot."""
    base, spec = slot.base, slot.spec
    width, side = spec.width, 4
    if isinstance(base, nn.Linear):
        width = base.in_features
    elif isinstance(base, nn.Conv2d):
        width = base.in_channels
        side = max(
            1 + (kernel - 1) * dilation for kernel, dilation in zip(base.kernel_size, base.dilation, strict=True)
        )
        side += 2 * max(base.stride)
    shape = {"image": (2, width, side, side), "tokens": (2, side, width), "vector": (2, width)}[spec.topology]
    generator = torch.Generator().manual_seed(0)
    like = next(parameter for parameter in base.parameters()) if base is not None else slot.alpha
    return torch.randn(shape, generator=generator).to(like)
