"""Reads what a run wrote or is writing, answers queries about it, and draws it."""

from esper.karn.evaluations import Evaluation, read_evaluations
from esper.karn.follower import RunFollower
from esper.karn.queries import Answer, ask
from esper.karn.report import write_film, write_report
from esper.karn.state import RunState, read_run
from esper.karn.timeline import draw_growth

__all__ = [
    "Answer",
    "Evaluation",
    "RunFollower",
    "RunState",
    "ask",
    "draw_growth",
    "read_evaluations",
    "read_run",
    "write_film",
    "write_report",
]
