"""What a policy is given, which actions are legal, and what it returns."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SeedStage
from esper.tamiyo.heads import ActionTable, Masks
from esper.tamiyo.signals import SlotView, TrainingSignals

PolicyState = Any  # each policy's own: what it carries from step to step


class PolicyView(NamedTuple):
    """What a policy sees before it acts."""

    signals: TrainingSignals
    features: Tensor
    """(N, size): the signals as a learned policy sees them, not yet normalised"""
    masks: Masks
    step: int
    """0 … T−1"""


@runtime_checkable
class Policy(Protocol):
    """A controller of growth."""

    @property
    def table(self) -> ActionTable:
        """The heads of its actions."""
        ...

    def initial_state(self, seeds: list[int]) -> PolicyState:
        """At the start of an episode; one host seed per env."""
        ...

    def act(self, view: PolicyView, state: PolicyState, uniform: Tensor) -> tuple[Tensor, PolicyState]:
        """Legal actions (N, heads) for all envs. `uniform` (N, heads) is all the chance that there is."""
        ...


def growth_masks(signals: TrainingSignals, table: ActionTable, ops: tuple[LifecycleOp, ...]) -> dict[str, Tensor]:
    """For a `growth_table` and the ops of its preset: op (N, ops), slot given op (N, ops, S), blueprint given slot
    (N, S, B), all else open. Reads nothing back from the device.

    WAIT addresses no slot: its row is empty, and no head looks at it. An alpha target may be the one that a seed holds:
    the head's mask knows no slot, and the op does what it says, it holds the seed there anew.
    """
    if LifecycleOp.WAIT not in ops:
        raise BadValueError(f"ops {[op.name for op in ops]} lack WAIT; it is what is legal when nothing else is")
    fits = signals.offers.fits
    slot = _addressable(signals.slots, fits.any(-1), ops)
    op = slot.any(-1)
    op[:, LifecycleOp.WAIT] = True
    masks = {**table.open_masks(len(fits), fits.device), "op": op, "slot": slot, "blueprint": fits}
    table.check_masks(masks, len(fits))
    return masks


def _addressable(slots: SlotView, offered: Tensor, ops: tuple[LifecycleOp, ...]) -> Tensor:
    """(N, ops, S): the slots that each op may address; none for WAIT and for ops that are not in the preset."""
    ready = {
        LifecycleOp.GERMINATE: (slots.stage == SeedStage.DORMANT) & offered,
        LifecycleOp.SET_ALPHA_TARGET: slots.can_retarget,
        LifecycleOp.PRUNE: slots.can_prune,
        LifecycleOp.FOSSILIZE: slots.can_fossilize,
        LifecycleOp.ADVANCE: slots.can_advance,
    }
    none = torch.zeros_like(offered)
    return torch.stack([ready.get(op, none) if op in ops else none for op in LifecycleOp], 1) & ~slots.ramping[:, None]
