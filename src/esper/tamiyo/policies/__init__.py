"""Policies that learn nothing, the baselines of the learned one: rules, chance and plans."""

from esper.tamiyo.policies.heuristic import HeuristicConfig, HeuristicTamiyo
from esper.tamiyo.policies.open_loop import (
    Plan,
    PlannedSeed,
    RandomCommitPolicy,
    RandomPolicy,
    SchedulePolicy,
    WaitPolicy,
)
from esper.tamiyo.policies.shipped import read_heuristic, read_plan, shipped_file

__all__ = [
    "HeuristicConfig",
    "HeuristicTamiyo",
    "Plan",
    "PlannedSeed",
    "RandomCommitPolicy",
    "RandomPolicy",
    "SchedulePolicy",
    "WaitPolicy",
    "read_heuristic",
    "read_plan",
    "shipped_file",
]
