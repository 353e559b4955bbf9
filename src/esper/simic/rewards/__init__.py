"""Rewards as pure functions over tensors of envs, each with its breakdown, and the attribution of gain to seeds."""

from esper.simic.rewards.attribution import (
    Attribution,
    Coalition,
    Finding,
    Score,
    Suspects,
    Suspicion,
    detect,
    findings,
    leave_one_out,
    sampled_shapley,
    shapley,
)
from esper.simic.rewards.config import DetectorLimits, Family, GammaMismatchError, RewardConfig, check_gamma
from esper.simic.rewards.families import FAMILIES, compute_reward
from esper.simic.rewards.potentials import (
    Rewarded,
    RewardInputs,
    is_measured,
    relative_loss,
)

__all__ = [
    "FAMILIES",
    "Attribution",
    "Coalition",
    "DetectorLimits",
    "Family",
    "Finding",
    "GammaMismatchError",
    "RewardConfig",
    "RewardInputs",
    "Rewarded",
    "Score",
    "Suspects",
    "Suspicion",
    "check_gamma",
    "compute_reward",
    "detect",
    "findings",
    "is_measured",
    "leave_one_out",
    "relative_loss",
    "sampled_shapley",
    "shapley",
]
