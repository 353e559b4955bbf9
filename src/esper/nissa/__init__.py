"""Writing it down: the event log of a run, and whoever watches beside it."""

from esper.nissa.catalogue import METRICS, Metric, find_metric
from esper.nissa.events import (
    AlarmRaised,
    EpisodeEnded,
    Event,
    Panicked,
    RoundExamined,
    RoundMeasured,
    RunBegun,
    RunEnded,
    RunResumed,
    SeedSuspected,
    StageChanged,
    as_line,
)
from esper.nissa.hub import Hub, Sink
from esper.nissa.log import JsonLines, end_of_lines, read_lines
from esper.nissa.watch import Watch

__all__ = [
    "METRICS",
    "AlarmRaised",
    "EpisodeEnded",
    "Event",
    "Hub",
    "JsonLines",
    "Metric",
    "Panicked",
    "RoundExamined",
    "RoundMeasured",
    "RunBegun",
    "RunEnded",
    "RunResumed",
    "SeedSuspected",
    "Sink",
    "StageChanged",
    "Watch",
    "as_line",
    "end_of_lines",
    "find_metric",
    "read_lines",
]
