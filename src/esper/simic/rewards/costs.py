"""What the shaped family takes away on the way: each cost blocks one exploit, is bounded, and is never positive, (N,).

The best that a policy can do about a cost is to avoid it, so none can be farmed. Costs of an action are read off the
state in which it was taken; those that need s' are 0 in a panic.
"""

import torch
from torch import Tensor

from esper.leyline import LifecycleOp, SeedStage
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.potentials import RewardInputs, is_measured
from esper.tamiyo.signals import SlotView


def op(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Interventions cost a little each: spamming is not free."""
    table = torch.tensor(config.op_costs, dtype=torch.float64, device=inputs.op.device)
    return -table[inputs.op]


def ratio(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Hosts that were made to depend on seeds without gaining from them.

    Counts the points by which contributions exceed what the gain may explain. Nothing is divided by the gain, so it may
    be 0, tiny or negative, and the limits may be 0.
    """
    after, limits = inputs.after, config.limits
    points = torch.where(is_measured(after.contribution, after.alpha), after.contribution.value.double(), 0.0)
    explained = (limits.ratio * inputs.gain.double().clamp_min(0)).clamp_min(limits.contribution)
    excess = (points - explained.unsqueeze(-1)).clamp_min(0).sum(-1)
    penalty = config.ratio_cap * (excess / config.ratio_range).clamp_max(1)
    return -torch.where(inputs.panic, 0.0, penalty)


def blending(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Going on blending in a seed that is measured to do harm."""
    before = inputs.before
    harmful = is_measured(before.contribution, before.alpha) & (before.contribution.value < 0)
    pays = harmful & (before.stage == SeedStage.BLENDING) & ~_leaving(before)
    return -torch.where(pays, _delay(config, before.steps_in_stage), 0.0).sum(-1)


def indecision(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Seeds that act but are neither committed nor cut, whatever else is done.

    The clock is the seed's age: sending alpha to and fro does not turn it back.
    """
    before = inputs.before
    undecided = (before.stage == SeedStage.BLENDING) | (before.stage == SeedStage.HOLDING)
    decides = (inputs.op == LifecycleOp.FOSSILIZE) | (inputs.op == LifecycleOp.PRUNE)
    pays = undecided & ~(_targeted(inputs) & decides.unsqueeze(-1)) & ~_leaving(before)
    return -torch.where(pays, _delay(config, before.age - config.patience), 0.0).sum(-1)


def prune(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Cutting a seed that was of use, or too young to know; at most `prune_bound`. Cutting a harmful one is free."""
    before = inputs.before
    points = torch.where(is_measured(before.contribution, before.alpha), before.contribution.value.double(), 0.0)
    useful = (config.prune_slope * points.clamp_min(0)).clamp_max(config.prune_cap)
    return young_prune(config, inputs) - torch.where(_pruned(inputs), useful, 0.0).sum(-1)


def young_prune(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Germinating and cutting in cadence."""
    missing = (config.young_age - inputs.before.age).clamp(0, config.young_age).double()
    return -torch.where(_pruned(inputs), config.young_cost * missing, 0.0).sum(-1)


def shock(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Jumps of alpha, by the size of what jumps: a ramp of k steps costs a k-th of a jump."""
    change = (inputs.after.alpha.double() - inputs.before.alpha.double()).square()
    weight = inputs.seed_parameters.double() / inputs.host_parameters.double().unsqueeze(-1)
    jolt = (config.shock_weight * (change * weight).sum(-1)).clamp_max(config.shock_cap)
    return -torch.where(inputs.panic, 0.0, jolt)


def _delay(config: RewardConfig, steps: Tensor) -> Tensor:
    return (config.delay_slope * steps.clamp_min(0).double()).clamp_max(config.delay_cap)


def _leaving(slots: SlotView) -> Tensor:
    """(N, S): on its way out already."""
    return slots.ramping & (slots.alpha_target == 0)


def _targeted(inputs: RewardInputs) -> Tensor:
    """(N, S): the slot that the action is about."""
    slots = torch.arange(inputs.before.stage.shape[-1], device=inputs.slot.device)
    return inputs.slot.unsqueeze(-1) == slots


def _pruned(inputs: RewardInputs) -> Tensor:
    return _targeted(inputs) & (inputs.op == LifecycleOp.PRUNE).unsqueeze(-1)
