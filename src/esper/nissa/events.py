"""What can happen in a run, as small records.

| event | kind | written to |
|---|---|---|
| StageChanged, Panicked, SeedSuspected, EpisodeEnded | stage, panic, suspect, episode | `events.jsonl` |
| AlarmRaised, RoundExamined | alarm, detail | `events.jsonl` |
| RoundMeasured | round | `metrics.jsonl`, whose lines have no kind |
| RunBegun, RunResumed, RunEnded | begun, resumed, ended | `sessions.jsonl` |

The first two files follow from the seed alone: those of a run that was killed and went on are those of one that never
was. What depends on the hour is in the third, apart from the seconds that a round took.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from esper.leyline.records import encode

Json = Any  # what will become JSON, or was


@dataclass(frozen=True)
class StageChanged:
    """A seed went from one stage to another."""

    kind: ClassVar[str] = "stage"
    round: int
    task: str
    step: int
    env: int
    slot: str
    blueprint: str | None
    source: str
    target: str
    cause: str


@dataclass(frozen=True)
class Panicked:
    """The governor took a host back to its snapshot."""

    kind: ClassVar[str] = "panic"
    round: int
    task: str
    step: int
    env: int
    symptoms: list[str]


@dataclass(frozen=True)
class SeedSuspected:
    """A seed looks better than it is, for the first time in its episode."""

    kind: ClassVar[str] = "suspect"
    round: int
    task: str
    step: int
    env: int
    slot: str
    suspicion: Literal["hacking", "ransomware"]
    severity: Literal["warning", "critical"]
    contribution: float
    """Points that the host would lose without it"""
    gain: float
    """Points that the host has over its control"""


@dataclass(frozen=True)
class EpisodeEnded:
    """The life of one host. Gains and accuracies in points."""

    kind: ClassVar[str] = "episode"
    round: int
    task: str
    env: int
    objective: float
    gain: float
    accuracy: float
    added_parameters: int
    accuracies: list[float]
    """After every step"""
    control_accuracies: list[float]
    alphas: dict[str, list[float]]
    """By slot, of those in which a seed ever acted"""
    decisions: dict[str, list[Json]]
    """Column by column: the steps that did not wait, and what every head chose there"""
    rewards: list[float | str]
    """Of every step; what is not finite in words"""
    reward_parts: dict[str, float | str]
    """Summed over the episode"""


@dataclass(frozen=True)
class AlarmRaised:
    """Something began to be wrong, or (`ended`) is so no more."""

    kind: ClassVar[str] = "alarm"
    alarm: str
    severity: Literal["info", "warning", "critical"]
    round: int
    subject: str
    """The head that it is about; empty where it is about the whole"""
    ended: bool
    value: float
    limit: float | None
    cause: str
    remedy: str

    @property
    def metric(self) -> str:
        """The name under which sinks draw it."""
        return f"alarms/{self.alarm}" + (f"/{self.subject}" if self.subject else "")

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.severity}: round {self.round}: {self.alarm}: {self.cause}{remedy}"


@dataclass(frozen=True)
class RoundExamined:
    """A round that was looked at closely, after an alarm; what is not finite in words."""

    kind: ClassVar[str] = "detail"
    round: int
    gradients: Mapping[str, Json]
    """By module, before clipping"""
    ratios: Mapping[str, Json]
    """Counts by head, and the worst by name"""
    observations: Mapping[str, Json]
    """By column, as the policy saw them"""
    lstm: Mapping[str, Json]
    """The memory in mid-episode, by task"""


@dataclass(frozen=True)
class RoundMeasured:
    """A line of the metrics."""

    kind: ClassVar[str] = "round"
    round: int
    values: Mapping[str, Json]
    """As they stand in the file, nested; the catalogue has them all"""

    def numbers(self) -> dict[str, float]:
        """Every number of it, those of nested objects as `outer/inner`; what is not finite is NaN or infinite again."""
        return dict(_numbers("", self.values))


@dataclass(frozen=True)
class RunBegun:
    """A process starts a run."""

    kind: ClassVar[str] = "begun"
    time: str
    """ISO 8601, UTC"""
    round: int
    """The first that it will train, from 0"""
    rounds: int
    """That the run will have in all"""
    machine: Mapping[str, Json]
    """What numbers may depend on: torch, its threads, the CPU's instructions"""
    git: str | None
    """The commit of the code, where it lies in a repository"""


@dataclass(frozen=True)
class RunResumed:
    """A process goes on with a run."""

    kind: ClassVar[str] = "resumed"
    time: str
    round: int
    rounds: int
    machine: Mapping[str, Json]
    git: str | None
    remarks: list[str]
    """What was not as the run had left it: checkpoints that are damaged, another machine"""


@dataclass(frozen=True)
class RunEnded:
    """A process is done with a run. Where this is missing it was killed, or is still at it."""

    kind: ClassVar[str] = "ended"
    time: str
    round: int
    """The first that was not trained"""
    why: str
    """complete, stopped (by Ctrl-C), or the error"""
    dropped: int
    """Events that sinks were too slow for, up to here"""


OfGrowth = StageChanged | Panicked | SeedSuspected | EpisodeEnded
OfLearning = AlarmRaised | RoundExamined | RoundMeasured
OfRuns = RunBegun | RunResumed | RunEnded
Event = OfGrowth | OfLearning | OfRuns


def as_line(event: Event) -> dict[str, Json]:
    """The line of a log: the kind, then the fields in their order. Curves are not copied."""
    line = {"kind": event.kind} | {field.name: getattr(event, field.name) for field in fields(event)}
    # An alarm may be about a number that JSON lacks. Elsewhere such a number is a fault, and the log refuses it.
    return dict(encode(line)) if isinstance(event, AlarmRaised) else line


def _numbers(prefix: str, values: Mapping[str, Json]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            yield f"{prefix}{name}", float(value)
