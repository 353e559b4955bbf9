"""The events and metrics of a run, and the sinks that show them."""

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
from esper.nissa.sinks import SinkSettings

__all__ = [
    "METRICS",
    "AlarmRaised",
    "EpisodeEnded",
    "Event",
    "Hub",
    "Metric",
    "Panicked",
    "RoundExamined",
    "RoundMeasured",
    "RunBegun",
    "RunEnded",
    "RunResumed",
    "SeedSuspected",
    "Sink",
    "SinkSettings",
    "StageChanged",
    "as_line",
    "find_metric",
]
