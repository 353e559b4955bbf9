"""The families of rewards. Each defines what the end is worth, the potential Φ and the costs on the way.

| family | the end is worth | Φ | costs |
|---|---|---|---|
| paired | hardened gain − rent of the fossils | live gain − rent | commits, if they have a price |
| shaped | the same | stages, attribution, rent | all costs below |
| simplified | hardened gain, without rent | stages | ops |
| sparse | hardened accuracy − rent, clamped, scaled | | |
| minimal | the same | | pruning too early |
| loss | loss of the hardened host below random guessing − rent | the same, live | |

A panic is worth what ending at chance would be, by the same formula, less a margin: in no family is it an escape.

Costs are bounded and never positive, so that none can be farmed; each blocks one exploit. Costs of an action depend on
the state in which it was taken. Those that need s' are 0 in a panic.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import LifecycleOp, SeedStage, rent
from esper.simic.rewards.config import SHOCK_CAP, RewardConfig
from esper.tamiyo.signals import Measured, SlotView

SHAPING = "shaping"
"""Name of the part that telescopes away; all other parts are final."""
STAGE_POTENTIALS = (0.0, 1.0, 2.0, 3.5, 5.5, 6.0, 0.0, 0.0, 0.0)
"""By stage, in the order of `SeedStage`; it never falls on the way to a fossil."""
STAGE_WEIGHT = 0.3  # points per unit of stage potential
RATIO_RANGE = 10.0  # points above the limit at which the ratio penalty reaches its cap
DELAY_CAP = 0.3  # largest cost of delay, per seed and step
PRUNE_CAP = 0.9  # largest cost of pruning a useful seed
YOUNG_AGE = 5  # age in steps below which a seed cannot be judged
LOSS_POINTS = 100.0  # `loss`: points for a loss of 0; the random-guess loss is worth 0

Levels = Mapping[str, Tensor]


class RewardInputs(NamedTuple):
    """One step s → s' of every env, (N,) unless stated otherwise; accuracies and gains in points.

    In a panic nothing of s' is read, because the host never reached it: such rows may hold anything, including NaN.
    """

    potential: Tensor  # Φ(s) as the previous step returned it; 0 at the start of an episode
    op: Tensor  # long: what was executed in s; WAIT if nothing was
    slot: Tensor  # long: where
    before: SlotView  # s; steps and ages count steps
    after: SlotView  # s'
    seed_parameters: Tensor  # (N, S) parameters of the seed that each slot held in s, or 0
    gain: Tensor  # of the live host in s'
    control_accuracy: Tensor
    chance_accuracy: Tensor
    loss: Tensor  # validation loss of the live host in s', in units of the random-guess loss
    acting_parameters: Tensor  # of all seeds with alpha > 0 in s'; in s after a panic
    fossil_parameters: Tensor
    host_parameters: Tensor
    terminal: Tensor  # bool: s' is the end of the episode
    objective_gain: Tensor  # of the hardened host, on the same images; read where terminal
    objective_loss: Tensor  # of the hardened host, in units of the random-guess loss; read where terminal
    panic: Tensor  # bool: training on the way to s' failed, and the host was restored to s


class Rewarded(NamedTuple):
    """A reward and its parts, and the potential for the next one."""

    parts: Mapping[str, Tensor]  # (N,) each
    potential: Tensor  # (N,) Φ(s') to pass to the next step: 0 after an episode, Φ(s) after a panic
    levels: Mapping[str, Tensor]  # (N,) each: the terms of Φ(s'); meaningless after a panic or an end

    @property
    def total(self) -> Tensor:
        """(N,) the sum of the parts, in their order."""
        return reduce(torch.add, self.parts.values())

    @property
    def shaped_share(self) -> Tensor:
        """(N,) absolute shaping over the sum of absolute parts, in [0, 1]; 0 if all parts are 0."""
        sizes = reduce(torch.add, (part.abs() for part in self.parts.values()))
        return torch.where(sizes > 0, self.parts[SHAPING].abs() / torch.where(sizes > 0, sizes, 1.0), 0.0)


def compute_reward(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """The reward of one step of every env, in the config's family."""
    return FAMILIES[config.family](config, inputs)


def paired(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """The change of the objective. With γ = 1 an episode's rewards sum to the objective minus the price of commits."""
    levels = {"gain": inputs.gain.double(), "rent": -_rent(config, inputs, inputs.acting_parameters)}
    before, after = ((slots.stage == SeedStage.FOSSILIZED).sum(-1).double() for slots in (inputs.before, inputs.after))
    # The k-th fossil costs k times the price, so n of them cost n·(n + 1) / 2 times the price.
    price = config.commit_price * (after * (after + 1) - before * (before + 1)) / 2
    return _rewarded(config, inputs, levels, _objective(config, inputs) | {"price": -price.where(~inputs.panic, 0.0)})


def shaped(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Stages, attribution and many small costs around the same objective."""
    credited, proxy = credit(inputs.after, inputs.gain).sum(-1), unexplained(inputs.after, inputs.gain)
    levels = {
        "stages": STAGE_WEIGHT * stage_potential(inputs.after.stage),
        "attribution": config.attribution_weight * credited + config.proxy_weight * proxy,
        "rent": -_rent(config, inputs, inputs.acting_parameters),
    }
    costs = {
        "ratio": ratio_cost(config, inputs),
        "blending": blending_cost(config, inputs),
        "indecision": indecision_cost(config, inputs),
        "prune": prune_cost(config, inputs),
        "shock": shock_cost(config, inputs),
        "op": op_cost(config, inputs),
    }
    return _rewarded(config, inputs, levels, _objective(config, inputs) | costs)


def simplified(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Stages, ops and gain. Size costs nothing."""
    levels = {"stages": STAGE_WEIGHT * stage_potential(inputs.after.stage)}
    at_chance = _chance_gain(inputs) - config.crash_margin
    ending = {"gain": _at_end(inputs, inputs.objective_gain), "penalty": _in_panic(inputs, at_chance)}
    return _rewarded(config, inputs, levels, ending | {"op": op_cost(config, inputs)})


def sparse(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Nothing until the end."""
    return _rewarded(config, inputs, {}, _accuracy(config, inputs))


def minimal(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Nothing until the end, except for pruning too early."""
    early = config.sparse_scale / 100 * young_prune_cost(config, inputs)
    return _rewarded(config, inputs, {}, _accuracy(config, inputs) | {"prune": early})


def loss(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Loss instead of accuracy, for tasks without one. Not paired: Φ includes the host's own progress."""
    levels = {"loss": _loss_points(inputs.loss), "rent": -_rent(config, inputs, inputs.acting_parameters)}
    ending = {
        "loss": _at_end(inputs, _loss_points(inputs.objective_loss)),
        "rent": _at_end(inputs, -_rent(config, inputs, inputs.fossil_parameters)),
        "penalty": _in_panic(inputs, -_panic_rent(config, inputs) - config.crash_margin),
    }
    return _rewarded(config, inputs, levels, ending)


FAMILIES: Mapping[str, Callable[[RewardConfig, RewardInputs], Rewarded]] = {
    family.__name__: family for family in (paired, shaped, simplified, sparse, minimal, loss)
}


def shaping(before: Tensor, after: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """γ Φ(s') − Φ(s), with Φ(s') := 0 where the sequence ends."""
    return gamma * torch.where(ends, 0.0, after.double()) - before.double()


def stage_potential(stage: Tensor) -> Tensor:
    """Sum of the stages' potentials over **all** slots, (N, S) → (N,)."""
    return torch.tensor(STAGE_POTENTIALS, dtype=torch.float64, device=stage.device)[stage].sum(-1)


def is_measured(contribution: Measured, alpha: Tensor) -> Tensor:
    """(N, S): whether a contribution counts. A silent seed (alpha 0) has none, whatever was recorded."""
    return contribution.valid & (alpha > 0)


def measured_points(slots: SlotView) -> Tensor:
    """Measured contributions, (N, S); 0 where there is none."""
    return torch.where(is_measured(slots.contribution, slots.alpha), slots.contribution.value.double(), 0.0)


def credit(slots: SlotView, gain: Tensor) -> Tensor:
    """Points that each seed is credited with, (N, S).

    Contributions that add up to more than the gain over the control are scaled down to it: neither dependence nor the
    host's own progress earns credit. Harm is charged in full. Silent or unmeasured seeds get nothing.
    """
    points = measured_points(slots)
    claims = points.clamp_min(0)
    claimed, earned = claims.sum(-1, keepdim=True), gain.double().clamp_min(0).unsqueeze(-1)
    share = torch.where(claimed > earned, earned / torch.where(claimed > 0, claimed, 1.0), 1.0)
    return claims * share + points.clamp_max(0)


def unexplained(slots: SlotView, gain: Tensor) -> Tensor:
    """Gain that measured contributions leave to acting but unmeasured seeds, (N,); 0 without such a seed."""
    unmeasured = (slots.alpha > 0) & ~slots.contribution.valid
    explained = credit(slots, gain).clamp_min(0).sum(-1)
    return torch.where(unmeasured.any(-1), (gain.double() - explained).clamp_min(0), 0.0)


def op_cost(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Every op costs a little, so that spamming is not free."""
    table = torch.tensor(config.op_costs, dtype=torch.float64, device=inputs.op.device)
    return -table[inputs.op]


def ratio_cost(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Making a host depend on seeds that it does not gain from.

    Counts the points by which contributions exceed what the gain can explain. Nothing is divided by the gain, so gain
    and limits may be 0.
    """
    limits = config.limits
    explained = (limits.ratio * inputs.gain.double().clamp_min(0)).clamp_min(limits.contribution)
    excess = (measured_points(inputs.after) - explained.unsqueeze(-1)).clamp_min(0).sum(-1)
    penalty = config.ratio_cap * (excess / RATIO_RANGE).clamp_max(1)
    return -torch.where(inputs.panic, 0.0, penalty)


def blending_cost(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Continuing to blend in a seed that is measured to do harm."""
    before = inputs.before
    pays = (measured_points(before) < 0) & (before.stage == SeedStage.BLENDING) & ~_leaving(before)
    return -torch.where(pays, _delay(config, before.steps_in_stage), 0.0).sum(-1)


def indecision_cost(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Seeds that act but are neither committed nor pruned, by their age: moving alpha does not reset it."""
    before = inputs.before
    undecided = (before.stage == SeedStage.BLENDING) | (before.stage == SeedStage.HOLDING)
    decides = (inputs.op == LifecycleOp.FOSSILIZE) | (inputs.op == LifecycleOp.PRUNE)
    pays = undecided & ~(_targeted(inputs) & decides.unsqueeze(-1)) & ~_leaving(before)
    return -torch.where(pays, _delay(config, before.age - config.patience), 0.0).sum(-1)


def prune_cost(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Pruning a useful seed, or one too young to judge; bounded. Pruning a harmful one is free."""
    useful = (config.prune_slope * measured_points(inputs.before).clamp_min(0)).clamp_max(PRUNE_CAP)
    return young_prune_cost(config, inputs) - torch.where(_pruned(inputs), useful, 0.0).sum(-1)


def young_prune_cost(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Germinating and pruning in turn."""
    missing = (YOUNG_AGE - inputs.before.age).clamp(0, YOUNG_AGE).double()
    return -torch.where(_pruned(inputs), config.young_cost * missing, 0.0).sum(-1)


def shock_cost(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Jumps of alpha, weighted by the size of the seed: a ramp of k steps costs 1/k of a jump."""
    change = (inputs.after.alpha.double() - inputs.before.alpha.double()).square()
    weight = inputs.seed_parameters.double() / inputs.host_parameters.double().unsqueeze(-1)
    cost = (config.shock_weight * (change * weight).sum(-1)).clamp_max(SHOCK_CAP)
    return -torch.where(inputs.panic, 0.0, cost)


def _delay(config: RewardConfig, steps: Tensor) -> Tensor:
    return (config.delay_slope * steps.clamp_min(0).double()).clamp_max(DELAY_CAP)


def _leaving(slots: SlotView) -> Tensor:
    """(N, S): already on its way out."""
    return slots.ramping & (slots.alpha_target == 0)


def _targeted(inputs: RewardInputs) -> Tensor:
    """(N, S): the slot that the action addresses."""
    slots = torch.arange(inputs.before.stage.shape[-1], device=inputs.slot.device)
    return inputs.slot.unsqueeze(-1) == slots


def _pruned(inputs: RewardInputs) -> Tensor:
    return _targeted(inputs) & (inputs.op == LifecycleOp.PRUNE).unsqueeze(-1)


def _rewarded(config: RewardConfig, inputs: RewardInputs, levels: Levels, other: Levels) -> Rewarded:
    """Shaping by the sum of `levels`, and the other parts."""
    after = torch.zeros_like(inputs.gain, dtype=torch.float64)
    for level in levels.values():
        after = after + level
    telescoping = config.shaping * shaping(inputs.potential, after, inputs.terminal | inputs.panic, config.gamma)
    stored = torch.where(inputs.terminal, 0.0, torch.where(inputs.panic, inputs.potential.double(), after))
    return Rewarded({SHAPING: telescoping, **other}, stored, levels)


def _at_end(inputs: RewardInputs, worth: Tensor) -> Tensor:
    """Paid at the end of an episode, unless it ends in a panic."""
    return torch.where(inputs.terminal & ~inputs.panic, worth.double(), 0.0)


def _in_panic(inputs: RewardInputs, worth: Tensor) -> Tensor:
    return torch.where(inputs.panic, worth.double(), 0.0)


def _objective(config: RewardConfig, inputs: RewardInputs) -> dict[str, Tensor]:
    at_chance = _chance_gain(inputs) - _panic_rent(config, inputs) - config.crash_margin
    return {
        "gain": _at_end(inputs, inputs.objective_gain),
        "rent": _at_end(inputs, -_rent(config, inputs, inputs.fossil_parameters)),
        "penalty": _in_panic(inputs, at_chance),
    }


def _accuracy(config: RewardConfig, inputs: RewardInputs) -> dict[str, Tensor]:
    """Clamped before scaling, so that the scale is a pure factor."""
    scale = config.sparse_scale
    final = inputs.control_accuracy + inputs.objective_gain.double() - _rent(config, inputs, inputs.fossil_parameters)
    chance = inputs.chance_accuracy.double() - _panic_rent(config, inputs)
    return {
        "accuracy": _at_end(inputs, scale * (final / 100).clamp(-1, 1)),
        "penalty": _in_panic(inputs, scale * ((chance / 100).clamp(-1, 1) - config.crash_margin / 100)),
    }


def _loss_points(relative: Tensor) -> Tensor:
    return LOSS_POINTS * (1 - relative.double()).clamp(-1, 1)


def _chance_gain(inputs: RewardInputs) -> Tensor:
    return inputs.chance_accuracy.double() - inputs.control_accuracy.double()


def _rent(config: RewardConfig, inputs: RewardInputs, parameters: Tensor) -> Tensor:
    return rent(parameters.double(), inputs.host_parameters.double(), config.rho)


def _panic_rent(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Never less than the rent of the fossils, which an episode that ends at chance would pay."""
    return _rent(config, inputs, torch.maximum(inputs.acting_parameters, inputs.fossil_parameters))
