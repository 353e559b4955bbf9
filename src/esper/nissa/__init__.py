"""The events and metrics of a run, and the sinks that show them."""

from esper.nissa.catalogue import find_metric
from esper.nissa.events import (
    AlarmRaised,
    CompileFailed,
    EpisodeEnded,
    Event,
    GrowthFinished,
    Panicked,
    RankStraggled,
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
    "AlarmRaised",
    "CompileFailed",
    "EpisodeEnded",
    "Event",
    "GrowthFinished",
    "Hub",
    "Panicked",
    "RankStraggled",
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
