"""The events and metrics of a run, and the sinks that show them."""

from esper.nissa.catalogue import find_metric
from esper.nissa.events import (
    AlarmRaised,
    CompileFailed,
    EpisodeEnded,
    Event,
    GrowthFinished,
    HostFollowed,
    Panicked,
    RankStraggled,
    RoundExamined,
    RoundMeasured,
    RunBegun,
    RunEnded,
    RunResumed,
    SeedSuspected,
    StageChanged,
    StepTaken,
    as_line,
)
from esper.nissa.hub import Hub, Sink
from esper.nissa.live import LiveFile
from esper.nissa.sinks import SinkSettings

__all__ = [
    "AlarmRaised",
    "CompileFailed",
    "EpisodeEnded",
    "Event",
    "GrowthFinished",
    "HostFollowed",
    "Hub",
    "LiveFile",
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
    "StepTaken",
    "as_line",
    "find_metric",
]
