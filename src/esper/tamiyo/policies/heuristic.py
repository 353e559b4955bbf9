"""The rule-based Tamiyo: germinate on a plateau, blend good auditions, fossilise or prune by contribution.

Rules in order of precedence; each env takes the first that applies:

    FOSSILIZE   HOLDING, few steps left, and worth its rent: the objective counts only fossils
    FOSSILIZE   HOLDING, and worth more than its rent by more than the measurement error
    PRUNE       HOLDING, and not worth its rent
    ADVANCE     TRAINING for long enough, and the audition exceeds its error; the best audition first
    PRUNE       TRAINING for too long without such an audition
    GERMINATE   the accuracy has stopped rising and there is time: the best offer not tried before
    WAIT
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SeedStage, SlotConfig, UnknownNameError, objective, rent
from esper.leyline.numbers import require_whole
from esper.tamiyo.heads import ActionTable
from esper.tamiyo.policy import PolicyView, Proposal, check_slots, propose, take_first
from esper.tamiyo.signals import HostView

OfferChoice = Literal["net", "per_cost", "worth"]
OFFER_CHOICES: tuple[OfferChoice, ...] = get_args(OfferChoice)

IN_PROGRESS = (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
COST_FLOOR = 1e-2  # lower bound of costs, in hosts, so that a free seed is not infinitely good


@dataclass(frozen=True)
class HeuristicConfig:
    """Thresholds of the rules. Times are in steps, values in points unless stated otherwise."""

    patience: int = 2
    """Steps without rising accuracy before a seed is germinated."""
    plateau: float = 1.0
    """Points above its old level at which the accuracy counts as rising."""
    at_once: int = 2
    """Maximum number of seeds in progress at the same time, not counting fossils."""
    germinate_left: int = 9
    """Minimum steps left to germinate: a seed needs that many to train, blend, hold and fossilise."""
    choice: OfferChoice = "net"
    """How the first-order worth of a blueprint is rated: net of its cost, per cost, or as it is."""
    cost_weight: float = 0.1
    """For choice `net`: the relative worth that pays for doubling the host."""
    training_steps: int = 3
    """Steps in TRAINING before an audition counts."""
    least_audition: float = 0.0
    """Points that an audition must exceed, net of its error, for the seed to be blended."""
    trial: int = 6
    """Steps in TRAINING after which a seed without a good audition is pruned."""
    advance_left: int = 5
    """Minimum steps left to blend: a seed needs that many to blend, hold and fossilise."""
    least_contribution: float = 0.0
    """Points that a contribution must exceed, net of rent and error, for the seed to be fossilised."""
    prune_below: float = 0.0
    """A held seed that contributes fewer points, net of rent, is pruned."""
    ending: int = 3
    """With at most this many steps left, every seed that pays its rent is fossilised, whatever the error."""
    errors: float = 1.0
    """Number of standard errors that make up the error."""
    rent: float = 2.0
    """Points that doubling the host costs."""

    def __post_init__(self) -> None:
        counts = {"patience": 0, "at_once": 1, "germinate_left": 1, "training_steps": 0, "advance_left": 1, "ending": 0}
        for name, least in counts.items():
            require_whole(name, getattr(self, name), least)
        require_whole("trial", self.trial, self.training_steps, remark=": auditions do not count before")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float and not (type(value) in (int, float) and math.isfinite(value)):
                raise BadValueError(f"{field.name} {value!r} is not a finite number")
        for name in ("plateau", "cost_weight", "errors", "rent"):
            if getattr(self, name) < 0:
                raise BadValueError(f"{name} {getattr(self, name)!r} is below 0")
        if self.choice not in OFFER_CHOICES:
            raise UnknownNameError("choice of blueprints", self.choice, OFFER_CHOICES)


class HeuristicState(NamedTuple):
    """The state of the rules during an episode."""

    level: Tensor  # (N,): the accuracy to exceed
    since: Tensor  # (N,): steps since it was exceeded
    tried: Tensor  # (N, S, B) bool: offers germinated so far
    asked: Tensor  # (N, S, B) bool: the offer that the last action asked for
    counts: Tensor  # (N, S): seeds germinated before that action


class HeuristicTamiyo:
    """Deterministic rules over the signals."""

    def __init__(self, table: ActionTable, slots: SlotConfig, config: HeuristicConfig | None = None) -> None:
        check_slots(table, slots)
        self.table, self.slots = table, slots
        self.config = config if config is not None else HeuristicConfig()

    def initial_state(self, seeds: list[int]) -> HeuristicState:
        level, since = torch.full((len(seeds),), -torch.inf), torch.zeros(len(seeds), dtype=torch.long)
        tried = torch.zeros((len(seeds), len(self.slots), len(self.slots.blueprint_names)), dtype=torch.bool)
        return HeuristicState(level, since, tried, tried, torch.zeros_like(tried[..., 0], dtype=torch.long))

    def act(self, view: PolicyView, state: HeuristicState, uniform: Tensor) -> tuple[Tensor, HeuristicState]:
        hosts = view.signals.hosts
        level, since, tried, asked, counts = (part.to(uniform.device) for part in state)  # moves in the first step only
        rising = hosts.accuracy > level + self.config.plateau
        level = hosts.accuracy.where(rising, level)
        since = (since + 1).where(~rising, 0)
        # What it asked for counts if something was germinated there: a learner that asks for advice need not follow it.
        names, slots = torch.arange(tried.shape[-1], device=tried.device), view.signals.slots
        tried = tried | (slots.blueprint[..., None] == names) | (asked & (slots.tried > counts)[..., None])
        left = steps_left(hosts, view.step)
        rules = [*self._judge_held(view, left), *self._judge_trained(view, left)]
        actions = take_first(self.table, view.masks, [*rules, self._germinate(view, left, since, tried)])
        op, slot, blueprint = (actions[:, self.table.index(name), None, None] for name in ("op", "slot", "blueprint"))
        places = torch.arange(tried.shape[1], device=tried.device)[:, None]
        asked = (op == LifecycleOp.GERMINATE) & (slot == places) & (blueprint == names)
        return actions, HeuristicState(level, since, tried, asked, slots.tried)

    def _judge_held(self, view: PolicyView, left: Tensor) -> tuple[Proposal, Proposal, Proposal]:
        """Fossilise at the end, fossilise, prune."""
        config, slots = self.config, view.signals.slots
        cost = view.signals.offers.cost.gather(-1, slots.blueprint.clamp(min=0)[..., None]).squeeze(-1)
        net = slots.contribution.value - rent(cost, 1.0, config.rent)
        error = config.errors * slots.contribution.error
        judged = (slots.stage == SeedStage.HOLDING) & slots.contribution.valid
        ending = (left <= config.ending)[:, None]
        return (
            propose(LifecycleOp.FOSSILIZE, judged & ending & (net > 0), net, view.masks),
            propose(LifecycleOp.FOSSILIZE, judged & (net - error > config.least_contribution), net, view.masks),
            propose(LifecycleOp.PRUNE, judged & (net < config.prune_below), -net, view.masks),
        )

    def _judge_trained(self, view: PolicyView, left: Tensor) -> tuple[Proposal, Proposal]:
        """Advance, prune."""
        config, slots = self.config, view.signals.slots
        audition = slots.audition
        judged = (slots.stage == SeedStage.TRAINING) & audition.valid & (slots.steps_in_stage >= config.training_steps)
        good = audition.value - config.errors * audition.error > config.least_audition
        in_time = (left >= config.advance_left)[:, None]
        overdue = slots.steps_in_stage >= config.trial
        return (
            propose(LifecycleOp.ADVANCE, judged & good & in_time, audition.value, view.masks),
            propose(LifecycleOp.PRUNE, judged & ~good & overdue, -audition.value, view.masks),
        )

    def _germinate(self, view: PolicyView, left: Tensor, since: Tensor, tried: Tensor) -> Proposal:
        config, stage = self.config, view.signals.slots.stage
        in_progress = sum((stage == each).sum(-1) for each in IN_PROGRESS)
        due = (since >= config.patience) & (left >= config.germinate_left) & (in_progress < config.at_once)
        offers = view.signals.offers
        rating = offers.worth
        if config.choice == "net":
            rating = objective(offers.worth, offers.cost, 1.0, config.cost_weight)
        elif config.choice == "per_cost":
            rating = offers.worth / offers.cost.clamp(min=COST_FLOOR)
        return propose(LifecycleOp.GERMINATE, due[:, None, None] & ~tried, rating, view.masks)


def steps_left(hosts: HostView, step: int) -> Tensor:
    """(N,): T − t, from the share (T − t) / T; infinite in step 0, where T is still unknown."""
    if step == 0:
        return torch.full_like(hosts.time_left, torch.inf)
    return (step * hosts.time_left / (1 - hosts.time_left)).round()
