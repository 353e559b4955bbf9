"""Settings of the reward. Amounts are points (percent of accuracy) unless stated otherwise."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from esper.leyline import DEFAULT_GAMMA, RHO, BadValueError, EsperError, LifecycleOp, UnknownNameError
from esper.leyline.numbers import require_positive, require_share, require_whole

Family = Literal["paired", "shaped", "simplified", "sparse", "minimal", "loss"]

STAGE_WEIGHT = 0.3
"""Points per unit of stage potential."""
PROXY_CONFIDENCE = 0.3
"""Weight of gain that no measured contribution explains, relative to the weight of attribution."""
RATIO_RANGE = 10.0
"""Points above the limit at which the ratio penalty reaches its cap."""
DELAY_CAP = 0.3
"""Largest cost of delay, per seed and step."""
PRUNE_CAP = 0.9
"""Largest cost of pruning a useful seed."""
YOUNG_AGE = 5
"""Age in steps below which a seed cannot be judged."""
SHOCK_CAP = 1.0
"""Largest cost of sudden changes of alpha, per step."""
LOSS_POINTS = 100.0
"""`loss`: points for a loss of 0; the random-guess loss is worth 0."""


class GammaMismatchError(EsperError, ValueError):
    """Shaping and trainer discount differently, so that shaping would change the optimal policy."""

    def __init__(self, reward_gamma: float, trainer_gamma: float) -> None:
        super().__init__(
            f"the reward's gamma {reward_gamma!r} is not the trainer's gamma {trainer_gamma!r}; "
            "shaping preserves the optimal policy only if they are equal: set reward.gamma and ppo.gamma alike"
        )


def check_gamma(reward_gamma: float, trainer_gamma: float) -> None:
    """Raise unless the two are equal. Trainers call it before their first step."""
    if reward_gamma != trainer_gamma:
        raise GammaMismatchError(reward_gamma, trainer_gamma)


@dataclass(frozen=True)
class DetectorLimits:
    """When a seed becomes a suspect."""

    contribution: float = 1.0
    """Contributions below this, in points, are never suspicious."""
    ratio: float = 5.0
    """A contribution of this many times the host's gain is suspicious."""

    def __post_init__(self) -> None:
        _require_amounts(self)


@dataclass(frozen=True)
class RewardConfig:
    """The family of the reward and its constants, which mean the same in every family that uses them."""

    family: Family = "paired"
    gamma: float = DEFAULT_GAMMA
    """Discount of the shaping; must equal the trainer's."""
    rho: float = RHO
    """Rent: points per doubling of the host."""
    commit_price: float = 0.0
    """`paired`: points for a host's first commit in addition to its rent, twice that for the second, and so on. Not a
    part of the objective; it breaks ties in favour of fewer seeds."""
    price_after: float = 0.5
    """Share of the run in which commits are free. A price from the start would teach the policy to commit nothing."""
    shaping: float = 1.0
    """Weight of potential-based shaping, 0 to 1. It does not change the optimal policy."""
    crash_margin: float = 5.0
    """Points by which a panic is worse than ending at chance."""
    attribution_weight: float = 1.0
    """Points per point that seeds are credited with."""
    germinate_cost: float = 0.15
    set_alpha_cost: float = 0.02
    prune_cost: float = 0.005
    fossilize_cost: float = 0.01
    advance_cost: float = 0.1
    limits: DetectorLimits = field(default_factory=DetectorLimits)
    """Limits of the detectors and of the ratio penalty."""
    ratio_cap: float = 0.3
    """Largest ratio penalty per step."""
    delay_slope: float = 0.05
    """Cost per step of indecision, or of blending in a harmful seed."""
    patience: int = 12
    """Age in steps from which indecision costs."""
    prune_slope: float = 0.05
    """Cost of pruning, per point that the seed contributed."""
    young_cost: float = 0.3
    """Cost of pruning too early, per missing step."""
    shock_weight: float = 0.2
    """Cost of (change of alpha)² × parameters of the seed / parameters of the host."""
    sparse_scale: float = 1.0
    """`sparse` and `minimal`: reward for 100 % of accuracy."""

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise UnknownNameError("reward family", self.family, get_args(Family))
        _require_amounts(self)
        require_share("gamma", self.gamma)
        require_whole("patience", self.patience, 0)
        for name in ("crash_margin", "sparse_scale"):
            require_positive(name, getattr(self, name))
        if self.price_after > 1:
            raise BadValueError(f"price_after {self.price_after!r} is not in [0, 1]: it is a share of the run")
        if self.commit_price and self.family != "paired":
            price, family = self.commit_price, self.family
            raise BadValueError(f"commit_price {price!r}: only the family paired has one, not {family!r}")
        # A crash skips the costs that depend on the state it never reached.
        if self.crash_margin <= self.ratio_cap + SHOCK_CAP:
            raise BadValueError(
                f"crash_margin {self.crash_margin!r} is not above ratio_cap + {SHOCK_CAP:g} "
                f"({self.ratio_cap + SHOCK_CAP!r}): a crash would save more than it costs"
            )

    def at(self, progress: float) -> "RewardConfig":
        """The settings at a share of the run."""
        return self if progress >= self.price_after else replace(self, commit_price=0.0)

    @property
    def proxy_weight(self) -> float:
        """Points per point of unexplained gain."""
        return self.attribution_weight * PROXY_CONFIDENCE

    @property
    def op_costs(self) -> tuple[float, ...]:
        """Cost of each op, by its value."""
        return tuple(float(getattr(self, OP_COSTS[op])) if op in OP_COSTS else 0.0 for op in LifecycleOp)

    @property
    def prune_bound(self) -> float:
        """The highest cost of pruning one seed, besides its op."""
        return PRUNE_CAP + self.young_cost * YOUNG_AGE


OP_COSTS = {
    LifecycleOp.GERMINATE: "germinate_cost",
    LifecycleOp.SET_ALPHA_TARGET: "set_alpha_cost",
    LifecycleOp.PRUNE: "prune_cost",
    LifecycleOp.FOSSILIZE: "fossilize_cost",
    LifecycleOp.ADVANCE: "advance_cost",
}
"""The setting that holds the cost of an op."""


def _require_amounts(config: DetectorLimits | RewardConfig) -> None:
    """Raise unless every float of the settings is finite and not negative."""
    for name in (each.name for each in fields(config) if each.type is float):
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise BadValueError(f"{name} {value!r} is not a finite number of 0 or more")
