"""From rules to actions: rules propose, masks forbid, the first proposal that is left is taken, or else the env waits.

All of it for a whole fleet at once. WAIT is legal everywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SlotConfig
from esper.tamiyo.heads import ActionTable, Masks


class Proposal(NamedTuple):
    """What one rule would do, (N,) each."""

    op: LifecycleOp
    applies: Tensor
    """bool: the rule wants it, and it is legal"""
    slot: Tensor
    blueprint: Tensor
    """Matters to GERMINATE alone."""


def check_fit(table: ActionTable, slots: SlotConfig) -> None:
    """Raise unless the table was made for these slots."""
    wanted = {"slot": len(slots), "blueprint": len(slots.blueprint_names)}
    for name, size in wanted.items():
        found = table.heads[table.index(name)].size
        if found != size:
            raise BadValueError(f"head {name!r} has {found} choices for {size} {name}s; make the table for these slots")


def pick(values: Tensor, choice: Tensor) -> Tensor:
    """(N, choices, …) at one choice each (N,) → (N, …)."""
    return values[torch.arange(len(choice), device=choice.device), choice]


def used_heads(table: ActionTable, op: Tensor) -> Tensor:
    """(N, heads) bool: what each op uses. The table crosses to the device without waiting for it."""
    return table.relevance.to(op.device, non_blocking=True)[op]


def legal_slots(masks: Masks, op: LifecycleOp) -> Tensor:
    """(N, S): where an op is legal."""
    return masks["op"][:, op, None] & masks["slot"][:, op]


def propose(op: LifecycleOp, wanted: Tensor, score: Tensor, masks: Masks) -> Proposal:
    """An op in the legal slot with the highest score, out of those that are wanted, (N, S) both."""
    candidates = wanted & legal_slots(masks, op)
    slot = _highest(score, candidates)
    return Proposal(op, candidates.any(-1), slot, torch.zeros_like(slot))


def propose_seed(wanted: Tensor, score: Tensor, masks: Masks) -> Proposal:
    """The legal seed with the highest score, out of the offers that are wanted, (N, S, B) both."""
    candidates = (wanted & legal_slots(masks, LifecycleOp.GERMINATE)[..., None] & masks["blueprint"]).flatten(1)
    place = _highest(score.flatten(1), candidates)
    slot, blueprint = place // wanted.shape[-1], place % wanted.shape[-1]
    return Proposal(LifecycleOp.GERMINATE, candidates.any(-1), slot, blueprint)


def _highest(score: Tensor, candidates: Tensor) -> Tensor:
    return score.float().masked_fill(~candidates, -torch.inf).argmax(-1)


def take_first(table: ActionTable, masks: Masks, proposals: Sequence[Proposal]) -> Tensor:
    """Actions (N, heads): the first proposal that applies."""
    op = torch.full_like(proposals[0].slot, LifecycleOp.WAIT)
    slot = blueprint = torch.zeros_like(op)
    for proposal in reversed(proposals):
        op = op.masked_fill(proposal.applies, proposal.op)
        slot = proposal.slot.where(proposal.applies, slot)
        blueprint = proposal.blueprint.where(proposal.applies, blueprint)
    return complete(table, masks, op, slot, blueprint)


def complete(table: ActionTable, masks: Masks, op: Tensor, slot: Tensor, blueprint: Tensor) -> Tensor:
    """Actions (N, heads) of these ops. Heads that do not matter keep their placeholder, and so do all others that may:
    add, a ramp of 3, target 1, cuts at once, linear, which is what preset `core` does. Where it is masked, the first
    legal choice stands in."""
    table.check_masks(masks, len(op))
    chosen = {"op": op, "slot": slot, "blueprint": blueprint}
    used = used_heads(table, op)
    for place, head in enumerate(table.heads):
        if head.name not in chosen:
            mask = masks[head.name] if head.given is None else pick(masks[head.name], chosen[head.given])
            first = mask.to(torch.uint8).argmax(-1)
            chosen[head.name] = first.masked_fill(mask[:, head.placeholder], head.placeholder)
        chosen[head.name] = chosen[head.name].where(used[:, place], head.placeholder)
    return torch.stack([chosen[name] for name in table.names], -1)
