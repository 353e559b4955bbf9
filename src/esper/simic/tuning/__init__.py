"""Searches with stated budgets: plans, plans per kind of host, and the heuristic's thresholds."""

from esper.simic.tuning.heuristic import search_heuristic
from esper.simic.tuning.schedule import SEARCH_METHODS, SearchMethod, search_schedule
from esper.simic.tuning.search import Search, Trial
from esper.simic.tuning.trials import Trials, shares
from esper.simic.tuning.tuned import EPISODES, Tuned, check_free, tune, write_tuned

__all__ = [
    "EPISODES",
    "SEARCH_METHODS",
    "Search",
    "SearchMethod",
    "Trial",
    "Trials",
    "Tuned",
    "check_free",
    "search_heuristic",
    "search_schedule",
    "shares",
    "tune",
    "write_tuned",
]
