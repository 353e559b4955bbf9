"""The families of rewards. Each says what the end is worth and what Φ is; the rest follows.

| family | the end is worth | Φ | paid on the way |
|---|---|---|---|
| paired | hardened gain − rent of the fossils | live gain − rent | commits, if they have a price |
| shaped | the same | stages, attribution, rent | costs of `esper.simic.rewards.costs` |
| simplified | hardened gain, no rent: says nothing about whether size pays | stages | ops |
| sparse | hardened accuracy − rent, clamped, scaled | | |
| minimal | the same | | pruning too early |
| loss | loss of the hardened host below random guessing − rent | the same, live | |

A panic is worth what ending at chance would be, less a margin: by the same formula, so in no family is it an escape.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from esper.leyline import LifecycleOp, SeedStage, rent
from esper.simic.rewards import costs
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.potentials import (
    SHAPING,
    RewardBreakdown,
    Rewarded,
    RewardInputs,
    carried,
    credit,
    shaping,
    stage_potential,
    unexplained,
)

Levels = Mapping[str, Tensor]


def compute_reward(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """The reward of one step of every env, in the config's family."""
    return FAMILIES[config.family](config, inputs)


def paired(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """The change of the objective. With γ = 1 an episode's rewards sum to the objective, less the price of commits."""
    levels = {"gain": inputs.gain.double(), "rent": -_acting_rent(config, inputs)}
    commits = (inputs.op == LifecycleOp.FOSSILIZE) & ~inputs.panic
    price = config.commit_price * (1 + (inputs.before.stage == SeedStage.FOSSILIZED).sum(-1))
    return _rewarded(config, inputs, levels, _objective(config, inputs) | {"price": -price * commits})


def shaped(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Stages, attribution and many small costs around the same objective."""
    after = inputs.after
    credited = credit(after.contribution, after.alpha, inputs.gain).sum(-1)
    proxy = unexplained(after.contribution, after.alpha, inputs.gain)
    levels = {
        "stages": config.stage_weight * stage_potential(after.stage),
        "attribution": config.attribution_weight * credited + config.proxy_weight * proxy,
        "rent": -_acting_rent(config, inputs),
    }
    paid = {
        "ratio": costs.ratio(config, inputs),
        "blending": costs.blending(config, inputs),
        "indecision": costs.indecision(config, inputs),
        "prune": costs.prune(config, inputs),
        "shock": costs.shock(config, inputs),
        "op": costs.op(config, inputs),
    }
    return _rewarded(config, inputs, levels, _objective(config, inputs) | paid)


def simplified(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Stages, ops, gain."""
    levels = {"stages": config.stage_weight * stage_potential(inputs.after.stage)}
    at_chance = _chance_gain(inputs) - config.crash_margin
    ending = {"gain": _at_end(inputs, inputs.objective_gain), "penalty": _in_panic(inputs, at_chance)}
    return _rewarded(config, inputs, levels, ending | {"op": costs.op(config, inputs)})


def sparse(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Nothing until the end."""
    return _rewarded(config, inputs, {}, _accuracy(config, inputs))


def minimal(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """Nothing until the end, but for seeds that were pruned too early."""
    early = config.sparse_scale / 100 * costs.young_prune(config, inputs)
    return _rewarded(config, inputs, {}, _accuracy(config, inputs) | {"prune": early})


def loss(config: RewardConfig, inputs: RewardInputs) -> Rewarded:
    """By loss in place of accuracy, for tasks without one. Not paired: Φ follows the host's own progress too."""
    levels = {"loss": _loss_points(config, inputs.loss), "rent": -_acting_rent(config, inputs)}
    ending = {
        "loss": _at_end(inputs, _loss_points(config, inputs.objective_loss)),
        "rent": _at_end(inputs, -_fossil_rent(config, inputs)),
        "penalty": _in_panic(inputs, -_panic_rent(config, inputs) - config.crash_margin),
    }
    return _rewarded(config, inputs, levels, ending)


FAMILIES: Mapping[str, Callable[[RewardConfig, RewardInputs], Rewarded]] = MappingProxyType(
    {
        "paired": paired,
        "shaped": shaped,
        "simplified": simplified,
        "sparse": sparse,
        "minimal": minimal,
        "loss": loss,
    }
)


def _rewarded(config: RewardConfig, inputs: RewardInputs, levels: Levels, other: Levels) -> Rewarded:
    """Shaping by the sum of `levels`, and the other parts."""
    after = torch.zeros_like(inputs.gain, dtype=torch.float64)
    for level in levels.values():
        after = after + level
    ends = inputs.terminal | inputs.panic
    telescoping = config.shaping * shaping(inputs.potential, after, ends, config.gamma)
    stored = carried(inputs.potential, after, inputs.terminal, inputs.panic)
    return Rewarded(RewardBreakdown({SHAPING: telescoping, **other}), stored, levels)


def _at_end(inputs: RewardInputs, worth: Tensor) -> Tensor:
    """What is paid at the end of an episode that ends in good health."""
    return torch.where(inputs.terminal & ~inputs.panic, worth.double(), 0.0)


def _in_panic(inputs: RewardInputs, worth: Tensor) -> Tensor:
    return torch.where(inputs.panic, worth.double(), 0.0)


def _objective(config: RewardConfig, inputs: RewardInputs) -> dict[str, Tensor]:
    at_chance = _chance_gain(inputs) - _panic_rent(config, inputs) - config.crash_margin
    return {
        "gain": _at_end(inputs, inputs.objective_gain),
        "rent": _at_end(inputs, -_fossil_rent(config, inputs)),
        "penalty": _in_panic(inputs, at_chance),
    }


def _accuracy(config: RewardConfig, inputs: RewardInputs) -> dict[str, Tensor]:
    """Clamped before it is scaled, so that the scale always scales."""
    scale = config.sparse_scale
    final = inputs.control_accuracy + inputs.objective_gain.double() - _fossil_rent(config, inputs)
    chance = inputs.chance_accuracy.double() - _panic_rent(config, inputs)
    return {
        "accuracy": _at_end(inputs, scale * (final / 100).clamp(-1, 1)),
        "penalty": _in_panic(inputs, scale * ((chance / 100).clamp(-1, 1) - config.crash_margin / 100)),
    }


def _loss_points(config: RewardConfig, relative: Tensor) -> Tensor:
    return config.loss_points * (1 - relative.double()).clamp(-1, 1)


def _chance_gain(inputs: RewardInputs) -> Tensor:
    return inputs.chance_accuracy.double() - inputs.control_accuracy.double()


def _acting_rent(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    return rent(inputs.acting_parameters.double(), inputs.host_parameters.double(), config.rho)


def _fossil_rent(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    return rent(inputs.fossil_parameters.double(), inputs.host_parameters.double(), config.rho)


def _panic_rent(config: RewardConfig, inputs: RewardInputs) -> Tensor:
    """Never less than that of the fossils, which an episode that ends at chance would pay."""
    owed = torch.maximum(inputs.acting_parameters, inputs.fossil_parameters)
    return rent(owed.double(), inputs.host_parameters.double(), config.rho)
