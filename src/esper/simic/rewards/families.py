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
from types import MappingProxyType

import torch
from torch import Tensor

from esper.leyline import LifecycleOp, SeedStage, rent
from esper.simic.rewards.config import (
    DELAY_CAP,
    LOSS_POINTS,
    PRUNE_CAP,
    RATIO_RANGE,
    SHOCK_CAP,
    STAGE_WEIGHT,
    YOUNG_AGE,
    RewardConfig,
)
from esper.simic.rewards.potentials import (
    SHAPING,
    Rewarded,
    RewardInputs,
    credit,
    measured_points,
    shaping,
    stage_potential,
    unexplained,
)
from esper.tamiyo.signals import SlotView

Levels = Mapping[str, Tensor]


def compute_reward(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """The reward of one step of every env, in the config's family."""
    return FAMILIES[config.family](config, inputs)


def paired(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """The change of the objective. With γ = 1 an episode's rewards sum to the objective minus the price of commits."""
    levels = {"gain": inputs.gain.double(), "rent": -_rent(config, inputs, inputs.acting_parameters)}
    commits = (inputs.op == LifecycleOp.FOSSILIZE) & ~inputs.panic
    price = config.commit_price * (1 + (inputs.before.stage == SeedStage.FOSSILIZED).sum(-1))
    return _rewarded(config, inputs, levels, _objective(config, inputs) | {"price": -price * commits})


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


FAMILIES: Mapping[str, Callable[[RewardConfig, RewardInputs], Rewarded]] = MappingProxyType(
    {family.__name__: family for family in (paired, shaped, simplified, sparse, minimal, loss)}
)


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
    """Pruning a useful seed, or one too young to judge; at most `prune_bound`. Pruning a harmful one is free."""
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
