"""Settings of the reward. All sums are in points (percent of accuracy) unless something else is said."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from esper.leyline import DEFAULT_GAMMA, RHO, BadValueError, EsperError, LifecycleOp, UnknownNameError
from esper.leyline.numbers import require_positive, require_share, require_whole

Family = Literal["paired", "shaped", "simplified", "sparse", "minimal", "loss"]


class GammaMismatchError(EsperError, ValueError):
    """Shaping and trainer discount differently, so that the shaping would change which policy is best."""

    def __init__(self, reward_gamma: float, trainer_gamma: float) -> None:
        super().__init__(
            f"the reward's gamma {reward_gamma!r} is not the trainer's gamma {trainer_gamma!r}; "
            "shaping keeps the best policy only where both are the same number: set reward.gamma and ppo.gamma alike"
        )


def check_gamma(reward_gamma: float, trainer_gamma: float) -> None:
    """Raise unless both are one number. Trainers call it before their first step."""
    if reward_gamma != trainer_gamma:
        raise GammaMismatchError(reward_gamma, trainer_gamma)


@dataclass(frozen=True)
class DetectorLimits:
    """Where a seed becomes suspicious."""

    contribution: float = 1.0
    """Points below which a contribution is never suspicious."""
    ratio: float = 5.0
    """A contribution of so many times the host's gain is suspicious."""

    def __post_init__(self) -> None:
        for name in ("contribution", "ratio"):
            _require_amount(name, getattr(self, name))


@dataclass(frozen=True)
class RewardConfig:
    """Which reward, and its constants; each is said once and means the same in every family that uses it."""

    family: Family = "paired"
    gamma: float = DEFAULT_GAMMA
    """Discount of the shaping; must be the trainer's."""
    rho: float = RHO
    """Rent: points per doubling of the host."""
    commit_price: float = 0.0
    """Points that a host's first commit costs in `paired`, beside its rent; its second costs twice that, and so on. The
    objective knows no such price: it breaks ties, where one more seed gains little or nothing, in favour of leaving
    it."""
    price_after: float = 0.5
    """Share of a run in which commits are free: who does not know yet what helps would learn to commit nothing. A price
    of further commits alone has the same effect."""
    shaping: float = 1.0
    """Weight of potential shaping: 1 = full, 0 = only what the end is worth. The best policy is the same."""
    crash_margin: float = 5.0
    """Points by which a panic is worse than ending at chance."""
    stage_weight: float = 0.3
    """Points per unit of stage potential."""
    attribution_weight: float = 1.0
    """Points per point of what seeds are credited with."""
    proxy_confidence: float = 0.3
    """Share of that weight for gain which no measured contribution explains."""
    germinate_cost: float = 0.15
    set_alpha_cost: float = 0.02
    prune_cost: float = 0.005
    fossilize_cost: float = 0.01
    advance_cost: float = 0.1
    limits: DetectorLimits = field(default_factory=DetectorLimits)
    """What the detectors report and the ratio penalty charges."""
    ratio_cap: float = 0.3
    """The most that the ratio penalty takes, per step."""
    ratio_range: float = 10.0
    """Points above the limit at which it takes that much."""
    delay_slope: float = 0.05
    """Cost of one more step of indecision, or of blending in a seed that does harm."""
    delay_cap: float = 0.3
    """The most that either takes, per seed and step."""
    patience: int = 12
    """Steps of a seed's life before indecision costs anything."""
    prune_slope: float = 0.05
    """Cost of pruning, per point that the seed contributed."""
    prune_cap: float = 0.9
    young_age: int = 5
    """Seeds younger than this are pruned too early to know."""
    young_cost: float = 0.3
    """Cost of that, per missing step."""
    shock_weight: float = 0.2
    """Cost of (change of alpha)² × seed's parameters / host's."""
    shock_cap: float = 1.0
    sparse_scale: float = 1.0
    """`sparse` and `minimal`: reward for 100 % of accuracy."""
    loss_points: float = 100.0
    """`loss`: points for the whole way from the random-guess loss to 0."""

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise UnknownNameError("reward family", self.family, get_args(Family))
        require_share("gamma", self.gamma)
        if not 0 <= self.price_after <= 1:
            raise BadValueError(f"price_after {self.price_after!r} is not in [0, 1]: it is a share of the run")
        for name in ("crash_margin", "ratio_range", "sparse_scale", "loss_points"):
            require_positive(name, getattr(self, name))
        for name in ("patience", "young_age"):
            require_whole(name, getattr(self, name), 0)
        for name in _AMOUNTS:
            _require_amount(name, getattr(self, name))
        if self.commit_price and self.family != "paired":
            price, family = self.commit_price, self.family
            raise BadValueError(f"commit_price {price!r}: only the family paired has one, not {family!r}")
        # A crash skips the costs that are read off the state it never reached.
        if self.crash_margin <= self.ratio_cap + self.shock_cap:
            raise BadValueError(
                f"crash_margin {self.crash_margin!r} is not above ratio_cap + shock_cap "
                f"({self.ratio_cap + self.shock_cap!r}): a crash would save more than it costs"
            )

    def at(self, progress: float) -> "RewardConfig":
        """What is paid at a share of the run."""
        return self if progress >= self.price_after else replace(self, commit_price=0.0)

    @property
    def proxy_weight(self) -> float:
        """Points per point of unexplained gain."""
        return self.attribution_weight * self.proxy_confidence

    @property
    def op_costs(self) -> tuple[float, ...]:
        """Cost of each op, by its value."""
        costs = {LifecycleOp.WAIT: 0.0} | {op: float(getattr(self, name)) for op, name in OP_COSTS.items()}
        return tuple(costs[op] for op in LifecycleOp)

    @property
    def prune_bound(self) -> float:
        """The most that pruning one seed can cost, besides its op."""
        return self.prune_cap + self.young_cost * self.young_age


OP_COSTS = {
    LifecycleOp.GERMINATE: "germinate_cost",
    LifecycleOp.SET_ALPHA_TARGET: "set_alpha_cost",
    LifecycleOp.PRUNE: "prune_cost",
    LifecycleOp.FOSSILIZE: "fossilize_cost",
    LifecycleOp.ADVANCE: "advance_cost",
}
"""The setting that holds the cost of an op."""

_AMOUNTS = (
    "commit_price",
    "rho",
    "shaping",
    "stage_weight",
    "attribution_weight",
    "proxy_confidence",
    *OP_COSTS.values(),
    "ratio_cap",
    "delay_slope",
    "delay_cap",
    "prune_slope",
    "prune_cap",
    "young_cost",
    "shock_weight",
    "shock_cap",
)


def _require_amount(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise BadValueError(f"{name} {value!r} is not a finite number of 0 or more")
