"""What a policy receives, which actions are legal, and how rules become actions, for a whole fleet at once."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SeedStage, SlotConfig
from esper.tamiyo.heads import ActionTable, Masks, pick
from esper.tamiyo.signals import TrainingSignals

PolicyState = Any  # each policy's own: what it carries from step to step


class PolicyView(NamedTuple):
    """What a policy sees before it acts."""

    signals: TrainingSignals
    features: Tensor  # (N, size): the signals as a learned policy sees them, before normalisation
    masks: Masks
    step: int  # 0 … T−1


@runtime_checkable
class Policy(Protocol):
    """A controller of growth."""

    @property
    def table(self) -> ActionTable:
        """The heads of its actions."""

    def initial_state(self, seeds: list[int]) -> PolicyState:
        """The state at the start of an episode; one host seed per env."""

    def act(self, view: PolicyView, state: PolicyState, uniform: Tensor) -> tuple[Tensor, PolicyState]:
        """Legal actions (N, heads) and the next state. `uniform` (N, heads) is the only source of chance."""


def growth_masks(signals: TrainingSignals, table: ActionTable, ops: tuple[LifecycleOp, ...]) -> dict[str, Tensor]:
    """Masks of a `growth_table` for the ops of its preset, without a device sync.

    op (N, ops), slot given op (N, ops, S), blueprint given slot (N, S, B); other heads are open. WAIT addresses no
    slot, so its row of the slot mask is empty. The alpha target may equal the current one, because its mask does not
    depend on the slot; the op then holds the seed there again.
    """
    if LifecycleOp.WAIT not in ops:
        raise BadValueError(f"ops {[op.name for op in ops]} lack WAIT; it must be legal when nothing else is")
    slots, fits = signals.slots, signals.offers.fits
    ready = {
        LifecycleOp.GERMINATE: (slots.stage == SeedStage.DORMANT) & fits.any(-1),
        LifecycleOp.SET_ALPHA_TARGET: slots.can_retarget,
        LifecycleOp.PRUNE: slots.can_prune,
        LifecycleOp.FOSSILIZE: slots.can_fossilize,
        LifecycleOp.ADVANCE: slots.can_advance,
    }
    none = torch.zeros_like(slots.ramping)
    slot = torch.stack([ready.get(op, none) if op in ops else none for op in LifecycleOp], 1) & ~slots.ramping[:, None]
    op = slot.any(-1)
    op[:, LifecycleOp.WAIT] = True
    masks = {**table.open_masks(len(fits), fits.device), "op": op, "slot": slot, "blueprint": fits}
    table.check_masks(masks, len(fits))
    return masks


class Proposal(NamedTuple):
    """The action that a rule proposes, (N,) each."""

    op: LifecycleOp
    applies: Tensor  # bool: the rule wants it, and it is legal
    slot: Tensor
    blueprint: Tensor  # used by GERMINATE alone


def check_slots(table: ActionTable, slots: SlotConfig) -> None:
    """Raise unless the table was made for these slots."""
    for name, expected in {"slot": len(slots), "blueprint": len(slots.blueprint_names)}.items():
        if (size := table.heads[table.index(name)].size) != expected:
            raise BadValueError(f"head {name!r} has {size} choices for {expected} {name}s; make a table for them")


def used_heads(table: ActionTable, op: Tensor) -> Tensor:
    """(…, heads) bool: the heads that ops (…) use. No device sync after the first call."""
    return _relevance(table, op.device)[op]


@cache
def _relevance(table: ActionTable, device: torch.device) -> Tensor:
    return table.relevance.to(device)


def legal_slots(masks: Masks, op: LifecycleOp) -> Tensor:
    """(N, S): the slots in which an op is legal."""
    return masks["op"][:, op, None] & masks["slot"][:, op]


def propose(op: LifecycleOp, wanted: Tensor, score: Tensor, masks: Masks) -> Proposal:
    """An op where it is wanted and legal and its score is highest, (N, S) both; (N, S, B) for GERMINATE."""
    legal = legal_slots(masks, op)
    if op == LifecycleOp.GERMINATE:
        legal = legal[..., None] & masks["blueprint"]
    candidates = (wanted & legal).flatten(1)
    highest = score.float().flatten(1).masked_fill(~candidates, -torch.inf).argmax(-1)
    blueprints = legal[0, 0].numel()  # 1 for ops that need none
    return Proposal(op, candidates.any(-1), highest // blueprints, highest % blueprints)


def take_first(table: ActionTable, masks: Masks, proposals: Sequence[Proposal]) -> Tensor:
    """Actions (N, heads): the first proposal that applies, else WAIT."""
    op = torch.full_like(proposals[0].slot, LifecycleOp.WAIT)
    slot = blueprint = torch.zeros_like(op)
    for proposal in reversed(proposals):
        op = op.masked_fill(proposal.applies, proposal.op)
        slot = proposal.slot.where(proposal.applies, slot)
        blueprint = proposal.blueprint.where(proposal.applies, blueprint)
    return complete(table, masks, op, slot, blueprint)


def complete(table: ActionTable, masks: Masks, op: Tensor, slot: Tensor, blueprint: Tensor) -> Tensor:
    """Actions (N, heads) with these ops, slots and blueprints.

    Other heads take their placeholder: add, a ramp of 3, target 1, cuts at once, linear, as preset `core` does. If a
    head is used and its placeholder is masked, it takes its first legal choice.
    """
    table.check_masks(masks, len(op))
    chosen = {"op": op, "slot": slot, "blueprint": blueprint}
    used = used_heads(table, op)
    for index, head in enumerate(table.heads):
        if head.name not in chosen:
            mask = masks[head.name] if head.given is None else pick(masks[head.name], chosen[head.given])
            first = mask.to(torch.uint8).argmax(-1)
            chosen[head.name] = first.masked_fill(mask[:, head.placeholder], head.placeholder)
        chosen[head.name] = chosen[head.name].where(used[:, index], head.placeholder)
    return torch.stack([chosen[name] for name in table.names], -1)
