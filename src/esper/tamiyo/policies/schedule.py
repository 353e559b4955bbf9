"""Plans that are executed to the letter, whatever the host does: the open-loop controller, and an oracle's replay."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SeedStage, SlotConfig, UnknownNameError
from esper.leyline.numbers import require_whole
from esper.tamiyo.heads import ActionTable, Masks
from esper.tamiyo.policies.proposals import check_fit, complete, pick
from esper.tamiyo.policy import PolicyView

MAX_SEEDS = 3
NEVER = 2**62


@dataclass(frozen=True)
class PlannedSeed:
    """One seed of a plan."""

    slot: str
    blueprint: str
    germinate_at: int
    """The step, from 0 on."""
    advance_after: int = 3
    """Steps from germination to blending; the gates of the lifecycle ask for three."""

    def __post_init__(self) -> None:
        require_whole("germinate_at", self.germinate_at, 0)
        require_whole("advance_after", self.advance_after, 0)


@dataclass(frozen=True)
class Plan:
    """What to grow, where and when; an empty plan waits. JSON by `esper.leyline.records`."""

    seeds: tuple[PlannedSeed, ...] = ()

    def __post_init__(self) -> None:
        if len(self.seeds) > MAX_SEEDS:
            raise BadValueError(f"a plan of {len(self.seeds)} seeds; at most {MAX_SEEDS} are allowed")
        names = [seed.slot for seed in self.seeds]
        if len(set(names)) != len(names):
            raise BadValueError(f"a plan with seeds in slots {names}: seeds are there to stay, give each its own slot")

    def check(self, slots: SlotConfig) -> None:
        """Raise unless these slots offer what the plan grows."""
        for seed in self.seeds:
            offered = [offer.name for offer in slots[seed.slot].blueprints]
            if seed.blueprint not in offered:
                raise UnknownNameError(f"blueprint for slot {seed.slot!r}", seed.blueprint, offered)


class Sowing(NamedTuple):
    """Plans of all envs as tensors, (N, seeds) each, in the order of the plan."""

    planned: Tensor
    """bool; where it is not set, a plan has fewer seeds than another"""
    slot: Tensor
    blueprint: Tensor
    germinate_at: Tensor
    advance_after: Tensor

    def to(self, device: torch.device) -> "Sowing":
        """On a device; itself where it is there already."""
        return Sowing(*(part.to(device, non_blocking=True) for part in self))


def sowing_of(plans: Sequence[Plan], slots: SlotConfig) -> Sowing:
    """One plan per env."""
    most = max((len(plan.seeds) for plan in plans), default=0) or 1  # one column that is not planned, if none is
    rows = [[_indices(seed, slots) for seed in plan.seeds] for plan in plans]
    padded = [row + [(0, 0, 0, 0, 0)] * (most - len(row)) for row in rows]
    columns = torch.tensor(padded, dtype=torch.long).reshape(len(plans), most, 5)
    planned, *rest = columns.unbind(-1)
    return Sowing(planned.bool(), *rest)


def _indices(seed: PlannedSeed, slots: SlotConfig) -> tuple[int, int, int, int, int]:
    blueprint = slots.blueprint_names.index(seed.blueprint)
    return 1, slots.index(seed.slot), blueprint, seed.germinate_at, seed.advance_after


def follow(table: ActionTable, view: PolicyView, sowing: Sowing) -> Tensor:
    """Actions (N, heads): of all that is due and legal, what has been due for longest; ties in the order of the plan.

    A seed is germinated once: one that the governor cut does not come back.
    """
    slots = view.signals.slots
    stage, age, held, tried = (
        part.gather(1, sowing.slot).long() for part in (slots.stage, slots.age, slots.steps_in_stage, slots.tried)
    )
    training, holding = stage == SeedStage.TRAINING, stage == SeedStage.HOLDING
    op = torch.full_like(stage, LifecycleOp.GERMINATE)
    op = op.masked_fill(training, LifecycleOp.ADVANCE).masked_fill(holding, LifecycleOp.FOSSILIZE)
    due = sowing.germinate_at.where(~training, view.step - age + sowing.advance_after)
    due = due.where(~holding, view.step - held)
    waits = ((stage == SeedStage.DORMANT) & (tried == 0)) | training | holding
    ready = sowing.planned & waits & (due <= view.step) & _legal(view.masks, op, sowing)
    seed = due.masked_fill(~ready, NEVER).argmin(-1)
    op = pick(op, seed).where(ready.any(-1), LifecycleOp.WAIT)
    return complete(table, view.masks, op, pick(sowing.slot, seed), pick(sowing.blueprint, seed))


def _legal(masks: Masks, op: Tensor, sowing: Sowing) -> Tensor:
    """(N, seeds): whether these ops may be done to these seeds."""
    env = torch.arange(len(op), device=op.device)[:, None]
    offered = masks["blueprint"][env, sowing.slot, sowing.blueprint] | (op != LifecycleOp.GERMINATE)
    return masks["op"][env, op] & masks["slot"][env, op, sowing.slot] & offered


class SchedulePolicy:
    """Executes a plan: one for all envs, or one for each (by which an oracle is replayed).

    Seeds are germinated when they are due, advanced `advance_after` steps later and fossilised at once, each as soon as
    legal if not then. One action a step: what has been due for longest goes first.
    """

    def __init__(self, table: ActionTable, slots: SlotConfig, plan: Plan | Sequence[Plan]) -> None:
        check_fit(table, slots)
        self.table, self.slots = table, slots
        self.plan = plan if isinstance(plan, Plan) else tuple(plan)
        for each in [plan] if isinstance(plan, Plan) else plan:
            each.check(slots)

    def initial_state(self, seeds: list[int]) -> Sowing:
        """The plans as tensors."""
        plans = [self.plan] * len(seeds) if isinstance(self.plan, Plan) else self.plan
        if len(plans) != len(seeds):
            raise BadValueError(f"{len(plans)} plans for {len(seeds)} envs; give one for each, or a single one for all")
        return sowing_of(plans, self.slots)

    def act(self, view: PolicyView, state: Sowing, uniform: Tensor) -> tuple[Tensor, Sowing]:
        """The next thing that is due."""
        sowing = state.to(uniform.device)
        return follow(self.table, view, sowing), sowing
