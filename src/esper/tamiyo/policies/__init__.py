"""Controllers that learn nothing: rules, chance and plans, against which a learned one is measured."""

from esper.tamiyo.policies.heuristic import HeuristicConfig, HeuristicTamiyo
from esper.tamiyo.policies.schedule import Plan, PlannedSeed, SchedulePolicy
from esper.tamiyo.policies.shipped import read_heuristic, read_plan, shipped_file
from esper.tamiyo.policies.simple import RandomCommitPolicy, RandomPolicy, WaitPolicy

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
