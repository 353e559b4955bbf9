"""What growing is worth: pure functions over tensors of envs, each reward with its breakdown."""

from esper.simic.rewards.attribution import (
    Attribution,
    Coalition,
    Score,
    leave_one_out,
    sampled_shapley,
    shapley,
)
from esper.simic.rewards.config import DetectorLimits, Family, GammaMismatchError, RewardConfig, check_gamma
from esper.simic.rewards.detectors import Finding, Suspects, Suspicion, detect, findings
from esper.simic.rewards.families import FAMILIES, compute_reward
from esper.simic.rewards.potentials import (
    RewardBreakdown,
    Rewarded,
    RewardInputs,
    is_measured,
    potential,
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
    "RewardBreakdown",
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
    "potential",
    "relative_loss",
    "sampled_shapley",
    "shapley",
]
