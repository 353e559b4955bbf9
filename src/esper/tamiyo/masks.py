"""What may be done: conditional masks for the heads of a growth table.

An op is legal if some slot may take it, a slot under GERMINATE if some blueprint fits there: every prefix of a legal
action can be completed, so drawing head after head never ends in an empty mask.
"""

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SeedStage
from esper.tamiyo.heads import ActionTable
from esper.tamiyo.signals import SlotView, TrainingSignals


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
