"""Policies that learn nothing, the baselines of the learned one: rules, chance and plans."""

from esper.tamiyo.policies.heuristic import HeuristicConfig, HeuristicTamiyo
from esper.tamiyo.policies.open_loop import (
    Plan,
    PlannedSeed,
    RandomCommitPolicy,
    RandomPolicy,
    SchedulePolicy,
    ToldPolicy,
    WaitPolicy,
)

__all__ = [
    "HeuristicConfig",
    "HeuristicTamiyo",
    "Plan",
    "PlannedSeed",
    "RandomCommitPolicy",
    "RandomPolicy",
    "SchedulePolicy",
    "ToldPolicy",
    "WaitPolicy",
]
