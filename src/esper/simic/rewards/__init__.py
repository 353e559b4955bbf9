"""Rewards as pure functions over tensors of envs, each with its breakdown, and the attribution of gain to seeds."""

from esper.simic.rewards.attribution import Finding, Suspects, Suspicion, detect, findings
from esper.simic.rewards.config import DetectorLimits, Family, GammaMismatchError, RewardConfig, check_gamma
from esper.simic.rewards.families import Rewarded, RewardInputs, compute_reward, is_measured

__all__ = [
    "DetectorLimits",
    "Family",
    "Finding",
    "GammaMismatchError",
    "RewardConfig",
    "RewardInputs",
    "Rewarded",
    "Suspects",
    "Suspicion",
    "check_gamma",
    "compute_reward",
    "detect",
    "findings",
    "is_measured",
]
