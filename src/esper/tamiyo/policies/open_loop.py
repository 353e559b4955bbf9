"""Policies that ignore the host: waiting, chance, and plans, which an oracle replays too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from esper.leyline import BadValueError, LifecycleOp, SeedStage, SlotConfig, UnknownNameError
from esper.leyline.numbers import require_whole
from esper.tamiyo.heads import ActionTable, MaskedCategorical, pick
from esper.tamiyo.policy import PolicyView, check_slots, complete, legal_slots, used_heads

MAX_SEEDS = 3
NEVER = 2**62


@dataclass(frozen=True)
class WaitPolicy:
    """Never grows anything."""

    table: ActionTable

    def initial_state(self, seeds: list[int]) -> None:
        """None."""

    def act(self, view: PolicyView, state: None, uniform: Tensor) -> tuple[Tensor, None]:
        wait = torch.full((len(uniform),), LifecycleOp.WAIT, device=uniform.device)
        return complete(self.table, view.masks, wait, wait, wait), None


@dataclass(frozen=True)
class RandomPolicy:
    """Draws each head uniformly from the choices that are legal given the earlier heads."""

    table: ActionTable

    def initial_state(self, seeds: list[int]) -> None:
        """None."""

    def act(self, view: PolicyView, state: None, uniform: Tensor) -> tuple[Tensor, None]:
        self.table.check_masks(view.masks, len(uniform))
        chosen: dict[str, Tensor] = {}
        used: Tensor | None = None
        for index, head in enumerate(self.table.heads):
            mask = view.masks[head.name] if head.given is None else pick(view.masks[head.name], chosen[head.given])
            choice = _draw(mask, uniform[:, index])
            used = used_heads(self.table, choice) if used is None else used
            chosen[head.name] = choice.where(used[:, index], head.placeholder)
        return torch.stack(list(chosen.values()), -1), None


def _draw(mask: Tensor, uniform: Tensor) -> Tensor:
    """A uniform legal choice of a mask (N, choices). If none is legal, the head is unused and any choice will do."""
    mask = mask | ~mask.any(-1, keepdim=True)
    return MaskedCategorical(torch.zeros_like(mask, dtype=torch.float), mask, validate=False).sample(uniform)


@dataclass(frozen=True)
class PlannedSeed:
    """One seed of a plan."""

    slot: str
    blueprint: str
    germinate_at: int  # step, from 0
    advance_after: int = 3  # steps from germination to blending; the gates of the lifecycle need three

    def __post_init__(self) -> None:
        require_whole("germinate_at", self.germinate_at, 0)
        require_whole("advance_after", self.advance_after, 0)


@dataclass(frozen=True)
class Plan:
    """What to grow, where and when; an empty plan waits."""

    seeds: tuple[PlannedSeed, ...] = ()

    def __post_init__(self) -> None:
        if len(self.seeds) > MAX_SEEDS:
            raise BadValueError(f"a plan of {len(self.seeds)} seeds; at most {MAX_SEEDS} are allowed")
        names = [seed.slot for seed in self.seeds]
        if len(set(names)) != len(names):
            raise BadValueError(f"the plan has seeds in slots {names}; seeds are permanent, give each its own slot")

    def check(self, slots: SlotConfig) -> None:
        """Raise unless these slots offer the planned blueprints."""
        for seed in self.seeds:
            offered = [offer.name for offer in slots[seed.slot].blueprints]
            if seed.blueprint not in offered:
                raise UnknownNameError(f"blueprint for slot {seed.slot!r}", seed.blueprint, offered)


class PlanTensors(NamedTuple):
    """The plans of all envs, (N, seeds) each, in the order of the plan."""

    planned: Tensor  # bool; False pads plans with fewer seeds than the longest
    slot: Tensor
    blueprint: Tensor
    germinate_at: Tensor
    advance_after: Tensor


def follow(table: ActionTable, view: PolicyView, plans: PlanTensors) -> Tensor:
    """Actions (N, heads): the legal step of each plan that has been due for longest; ties in the order of the plan."""
    slots = view.signals.slots
    stage, age, held, tried = (
        part.gather(1, plans.slot).long() for part in (slots.stage, slots.age, slots.steps_in_stage, slots.tried)
    )
    training, holding = stage == SeedStage.TRAINING, stage == SeedStage.HOLDING
    op = torch.full_like(stage, LifecycleOp.GERMINATE)
    op = op.masked_fill(training, LifecycleOp.ADVANCE).masked_fill(holding, LifecycleOp.FOSSILIZE)
    due = plans.germinate_at.where(~training, view.step - age + plans.advance_after)
    due = due.where(~holding, view.step - held)
    # A seed is germinated once; one that the governor cut is not germinated again.
    waits = ((stage == SeedStage.DORMANT) & (tried == 0)) | training | holding
    masks, env = view.masks, torch.arange(len(op), device=op.device)[:, None]
    offered = masks["blueprint"][env, plans.slot, plans.blueprint] | (op != LifecycleOp.GERMINATE)
    legal = masks["op"][env, op] & masks["slot"][env, op, plans.slot] & offered
    ready = plans.planned & waits & (due <= view.step) & legal
    seed = due.masked_fill(~ready, NEVER).argmin(-1)
    op = pick(op, seed).where(ready.any(-1), LifecycleOp.WAIT)
    return complete(table, masks, op, pick(plans.slot, seed), pick(plans.blueprint, seed))


class SchedulePolicy:
    """Executes a plan: one for all envs, or one per env (an oracle's replay).

    Seeds are germinated when due, advanced `advance_after` steps later and fossilised at once, or else as soon as it is
    legal. There is one action per step; the one that has been due for longest goes first.
    """

    def __init__(self, table: ActionTable, slots: SlotConfig, plan: Plan | Sequence[Plan]) -> None:
        check_slots(table, slots)
        self.table, self.slots, self.plan = table, slots, plan
        for each in [plan] if isinstance(plan, Plan) else plan:
            each.check(slots)

    def initial_state(self, seeds: list[int]) -> PlanTensors:
        """The plans as tensors, with at least one column, which may be padding."""
        plans = [self.plan] * len(seeds) if isinstance(self.plan, Plan) else self.plan
        if len(plans) != len(seeds):
            raise BadValueError(f"got {len(plans)} plans for {len(seeds)} envs; pass one plan, or one per env")
        names, slot_of = self.slots.blueprint_names, self.slots.index
        rows = [
            [(1, slot_of(s.slot), names.index(s.blueprint), s.germinate_at, s.advance_after) for s in plan.seeds]
            for plan in plans
        ]
        padded = pad_sequence([torch.tensor(row or [[0] * 5]) for row in rows], batch_first=True)
        planned, *rest = padded.unbind(-1)
        return PlanTensors(planned.bool(), *rest)

    def act(self, view: PolicyView, state: PlanTensors, uniform: Tensor) -> tuple[Tensor, PlanTensors]:
        plans = PlanTensors(*(part.to(uniform.device) for part in state))  # moves in the first step only
        return follow(self.table, view, plans), plans


class ToldPolicy(SchedulePolicy):
    """Executes the plan of each host's kind, which it is told; no policy that decides by what it sees is."""

    def __init__(
        self, table: ActionTable, slots: SlotConfig, plans: Mapping[str, Plan], kind_of: Callable[[int], str]
    ) -> None:
        """`kind_of`: the kind of the host with this seed."""
        super().__init__(table, slots, list(plans.values()))
        self.plans, self.kind_of = plans, kind_of

    def initial_state(self, seeds: list[int]) -> PlanTensors:
        """The plans as tensors, each host's by its seed."""
        plans = [self.plans[self.kind_of(seed)] for seed in seeds]
        return SchedulePolicy(self.table, self.slots, plans).initial_state(seeds)


class RandomCommitPolicy:
    """Germinates one random seed per env at a random step of the first half, then always blends and fossilises it."""

    def __init__(self, table: ActionTable, steps: int) -> None:
        """`steps` is the length of an episode, which the first view does not show."""
        require_whole("steps", steps, 1)
        self.table, self.steps = table, steps

    def initial_state(self, seeds: list[int]) -> None:
        """None: the first step draws the seed from the legal ones."""

    def act(self, view: PolicyView, state: PlanTensors | None, uniform: Tensor) -> tuple[Tensor, PlanTensors]:
        """The first draws decide everything; later ones are unused."""
        if state is None:
            when, where, what = (uniform[:, self.table.index(name)] for name in ("op", "slot", "blueprint"))
            latest = self.steps // 2
            slot = _draw(legal_slots(view.masks, LifecycleOp.GERMINATE), where)
            blueprint = _draw(pick(view.masks["blueprint"], slot), what)
            germinate_at = view.step + (when * (latest + 1)).long().clamp(max=latest)
            parts = (torch.ones_like(slot, dtype=torch.bool), slot, blueprint, germinate_at, torch.zeros_like(slot))
            state = PlanTensors(*(part[:, None] for part in parts))
        return follow(self.table, view, state), state
