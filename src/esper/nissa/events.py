"""The events of a run, as small records.

| event | kind | written to |
|---|---|---|
| Panicked, SeedSuspected, EpisodeEnded | panic, suspect, episode | `events.jsonl` |
| HostFollowed | followed | `events.jsonl`, of the first few hosts |
| AlarmRaised, RoundExamined | alarm, detail | `events.jsonl` |
| StageChanged, GrowthFinished | stage, finished | `events.jsonl` of a Grower, which also has panic and followed |
| RoundMeasured | round | `metrics.jsonl`, whose lines have no kind |
| RunBegun, RunResumed, RunEnded | begun, resumed, ended | `sessions.jsonl` |
| CompileFailed, RankStraggled | compile_failed, straggled | `sessions.jsonl` |
| StepTaken | step | `live.jsonl`, emptied every round |

The first two files depend only on the seed, apart from the seconds that a round took: a run that was killed and resumed
writes the same as one that never stopped. The third holds what depends on the clock or the machine. The last is for
those who watch, and no part of what a run has computed.

An episode has its changes of stage in order, by column, because a line per change would be three quarters of the log:

    "stages": {"step": [0, 0, 3], "slot": ["r1c2", "r1c2", "r1c2"], "blueprint": ["norm", "norm", "norm"],
               "source": "DGT", "target": "GTB", "cause": "gta"}

Here a seed is germinated at step 0, trains after the tick of that step, and is advanced to BLENDING at step 3. A stage
is written as its first letter (`SeedStage.letter`), a cause as its letter in `esper.leyline.CAUSES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from esper.leyline.records import NOT_FINITE, Json, encode, flatten

Severity = Literal["info", "warning", "critical"]
Choices = dict[str, dict[str, float]]
"""By head: what could be chosen, with its probability given the choices of earlier heads; the likeliest first"""
SeedMeasured = tuple[str, float | None, float | None, float | None, float | None]
"""Slot, audition and its error, contribution and its error, in points"""
SeedRow = tuple[int, str, str, str | None, float, float | None, float | None, float | None, float | None]
"""Of a slot that is not empty: env, slot, stage, blueprint, alpha, then as `SeedMeasured`"""
ActionRow = tuple[int, str, str | None, str | None]
"""Env, op, slot, blueprint of a decision other than WAIT"""
ChangeRow = tuple[int, str, str | None, str, str, str]
"""Env, slot, blueprint, source, target, cause"""


@dataclass(frozen=True)
class HostEvent:
    """Something that happened to one host in one step."""

    kind: ClassVar[str]
    round: int
    task: str
    step: int
    env: int


@dataclass(frozen=True)
class StageChanged(HostEvent):
    """A seed of a Grower changed its stage."""

    kind: ClassVar[str] = "stage"
    slot: str
    blueprint: str | None
    source: str
    target: str
    cause: str


@dataclass(frozen=True)
class Panicked(HostEvent):
    """The governor restored a host's snapshot."""

    kind: ClassVar[str] = "panic"
    symptoms: list[str]


@dataclass(frozen=True)
class GrowthFinished(HostEvent):
    """A Grower has finished its model."""

    kind: ClassVar[str] = "finished"
    kept: list[str]  # slots whose seeds are now part of the model
    dropped: list[str]


@dataclass(frozen=True)
class SeedSuspected(HostEvent):
    """A seed became a suspect: it looks better than it is."""

    kind: ClassVar[str] = "suspect"
    slot: str
    suspicion: Literal["hacking", "ransomware"]
    severity: Literal["warning", "critical"]
    contribution: float  # points that the host would lose without the seed
    gain: float  # points that the host has over its control


@dataclass(frozen=True)
class HostFollowed(HostEvent):
    """What a policy considered on one host, and what was measured of its seeds, from a step on."""

    kind: ClassVar[str] = "followed"
    choices: list[Choices]  # after every step; empty where a rule decided
    measured: list[list[SeedMeasured]]  # after every step


@dataclass(frozen=True)
class StepTaken:
    """One step of all hosts of a task, as it happens. Hosts are in order; None is what is unknown or not finite."""

    kind: ClassVar[str] = "step"
    time: float  # seconds since 1970
    round: int
    task: str
    step: int
    steps: int  # of the episode
    first_env: int  # number of the first host
    slots: list[str]
    accuracies: list[float | None]
    control_accuracies: list[float | None]
    gains: list[float | None]  # points over the control
    losses: list[float | None]
    seeds: list[SeedRow]
    actions: list[ActionRow]
    probabilities: list[float]  # of each host's action, all its choices together; empty where a rule decided
    choices: list[Choices]  # of the first few hosts
    changes: list[ChangeRow]
    panics: list[tuple[int, list[str]]]  # env, symptoms


@dataclass(frozen=True)
class EpisodeEnded:
    """The episode of one host. Gains and accuracies in points."""

    kind: ClassVar[str] = "episode"
    round: int
    task: str
    env: int
    objective: float
    gain: float
    accuracy: float
    added_parameters: int
    stages: dict[str, Json]  # by column
    accuracies: list[float]  # after every step
    control_accuracies: list[float]
    alphas: dict[str, list[float]]  # by slot, if a seed ever acted in it; whole numbers are integers
    decisions: dict[str, list[Json]]  # by column: the steps that did not wait, and the choice of every head
    rewards: list[float | str]  # after every step; numbers that are not finite as words
    reward_parts: dict[str, float | str]  # summed over the episode


@dataclass(frozen=True)
class AlarmRaised:
    """An alarm began or ended: a problem, or its end."""

    kind: ClassVar[str] = "alarm"
    alarm: str
    severity: Severity
    round: int
    subject: str  # the head or the part of the LSTM; empty if the alarm is about the whole
    ended: bool
    value: float
    limit: float | None
    cause: str  # a sentence with value and limit
    remedy: str

    @property
    def metric(self) -> str:
        """The name of its curve in sinks."""
        return f"alarms/{self.alarm}" + (f"/{self.subject}" if self.subject else "")

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.severity}: round {self.round}: {self.alarm}: {self.cause}{remedy}"


@dataclass(frozen=True)
class RoundExamined:
    """A round in detail, after an alarm; numbers that are not finite as words."""

    kind: ClassVar[str] = "detail"
    round: int
    gradients: Mapping[str, Json]  # by module, before clipping
    ratios: Mapping[str, Json]  # counts by head, and the worst offenders
    observations: Mapping[str, Json]  # by column, normalised
    lstm: Mapping[str, Json]  # the hidden state in the middle of the episode, by task


@dataclass(frozen=True)
class RoundMeasured:
    """The metrics of a round."""

    kind: ClassVar[str] = "round"
    round: int
    values: Mapping[str, Json]  # as in the file, nested; the catalogue lists them

    def numbers(self) -> dict[str, float]:
        """All numbers by path (`outer/inner`), including NaN and infinities."""
        leaves = flatten(self.values)
        return {name: float(value) for name, value in leaves if isinstance(value, int | float) or value in NOT_FINITE}


@dataclass(frozen=True)
class RunBegun:
    """A process began a run."""

    kind: ClassVar[str] = "begun"
    time: str  # ISO 8601, UTC
    round: int  # the first round to train, from 0
    rounds: int  # rounds of the whole run
    machine: Mapping[str, Json]  # what results may depend on: torch, its threads, the CPU's instructions
    git: str | None  # the commit of the code, if it is in a repository


@dataclass(frozen=True)
class RunResumed(RunBegun):
    """A process resumed a run."""

    kind: ClassVar[str] = "resumed"
    remarks: list[str]  # what has changed since: damaged checkpoints, another machine


@dataclass(frozen=True)
class RunEnded:
    """A process ended its work on a run. Without this event it was killed, or is still running."""

    kind: ClassVar[str] = "ended"
    time: str
    round: int  # the first round that was not trained
    why: str  # complete, stopped (by Ctrl-C), or the error
    dropped: int  # events that sinks missed


@dataclass(frozen=True)
class CompileFailed:
    """`torch.compile` failed; the run continues in eager mode."""

    kind: ClassVar[str] = "compile_failed"
    time: str
    round: int
    why: str  # the compiler's error


@dataclass(frozen=True)
class RankStraggled:
    """All other ranks have waited for this one, for some rounds."""

    kind: ClassVar[str] = "straggled"
    time: str
    round: int
    rank: int
    why: str


Event = (HostEvent | StepTaken | EpisodeEnded | AlarmRaised | RoundExamined | RoundMeasured) | (
    RunBegun | RunEnded | CompileFailed | RankStraggled
)


def as_line(event: Event) -> dict[str, Json]:
    """The line of a log: the kind, then the fields in order. Lists are not copied."""
    line = {"kind": event.kind} | {field.name: getattr(event, field.name) for field in fields(event)}
    # An alarm may be about a number that JSON lacks. In other events such a number is a fault, which the log refuses.
    return dict(encode(line)) if isinstance(event, AlarmRaised) else line
