"""The run of a Grower, read from its folder: steps of one model. They count from 1, as they were printed.

A step is complete when `metrics.jsonl` has its line; events of other steps are skipped.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from esper.karn.fields import Fields, checked_lines
from esper.karn.histories import HostHistory, LiveRound
from esper.karn.lines import Action, Choices, PanicEvent, SeedScores, StageEvent, change_of, followed_of
from esper.karn.state import EVENTS, METRICS, Counter, read_header
from esper.leyline import ACTIVE_STAGES, BadValueError, Measurement
from esper.leyline.records import NOT_FINITE

DRAWN = ("stage", "panic", "finished", "followed")
"""Kinds of events that are drawn"""
ACTIONS = ("germinate", "advance", "fossilize", "prune")
"""Causes of changes that are decisions"""


class Step(NamedTuple):
    """A line of the metrics."""

    number: int
    accuracy: float | None
    loss: float | None
    """None where it was not finite"""
    grown: int
    contributions: dict[str, Measurement]
    remarks: list[str]


class Finish(NamedTuple):
    """Slots whose seeds stayed in the finished model, and those whose seeds were dropped."""

    kept: list[str]
    dropped: list[str]


@dataclass
class GrowthRun:
    """What the logs tell of a Grower's run, folded from their lines."""

    counter: ClassVar[Counter] = "step"
    path: Path
    config: Fields
    git: str | None
    torch: str | None
    begins_after: int
    """Steps before the log began"""
    steps: list[Step] = field(default_factory=list)
    changes: list[StageEvent] = field(default_factory=list)
    panics: list[PanicEvent] = field(default_factory=list)
    finish: Finish | None = None
    choices: dict[int, Choices] = field(default_factory=dict)
    """What a learned policy chose among, by step"""
    live: LiveRound | None = None
    """The steps that this process has seen; the log has them too"""

    @classmethod
    def of(cls, path: Path, header: Fields) -> Self:
        """The state of a run before its first line."""
        config = header.inside("config")
        for name in ("budget", "steps", "host_parameters"):
            config.whole(name)
        config.inside("slots")
        git, torch_version = map(header.optional_text, ("git", "torch"))
        return cls(path, config, git, torch_version, header.whole("begins_after"))

    @property
    def slots(self) -> list[str]:
        """All slots, in the order in which the data passes them."""
        return list(dict.fromkeys([*self.config.inside("slots"), *(change.slot for change in self.changes)]))

    @property
    def complete(self) -> int:
        """The newest complete step."""
        return self.steps[-1].number if self.steps else self.begins_after

    def add_metrics(self, line: Fields) -> None:
        """Add a line of `metrics.jsonl`: a complete step."""
        step = _step(line)
        if self.steps and step.number <= self.complete:
            raise BadValueError(f"{line.where}: step {step.number} comes after step {self.complete}")
        self.steps.append(step)

    def add_event(self, line: Fields) -> None:
        """Add a line of `events.jsonl`, if its step is complete."""
        kind = line.text("kind")
        if kind not in DRAWN or (step := line.whole("step")) > self.complete:
            return
        # A timeline puts ticks and panics behind the training of their step. Here a step is counted when it is trained.
        if kind == "stage":
            change = change_of(line, 0)
            self.changes.append(change._replace(step=step - (change.at - change.step)))
        elif kind == "panic":
            self.panics.append(PanicEvent(step - 1, 0, _words(line, "symptoms")))
        elif kind == "followed":
            for choices in followed_of(line).choices:
                self.choices[step] = choices
        else:
            self.finish = Finish(_words(line, "kept"), _words(line, "dropped"))

    def begin_live(self, number: int) -> None:
        """A process begins to write steps."""
        self.live = LiveRound(number)

    def histories(self) -> list[HostHistory]:
        """The one model, as a list like that of a round of hosts."""
        measured = {
            step.number: {slot: SeedScores(None, value) for slot, value in step.contributions.items()}
            for step in self.steps
            if step.contributions
        }
        history = HostHistory(
            env=0,
            task=self.config.text("host"),
            steps=self.config.whole("steps"),
            begins_after=self.begins_after,
            accuracies=[step.accuracy for step in self.steps],
            losses=[step.loss for step in self.steps],
            changes=self.changes,
            panics=self.panics,
            choices=self.choices,
            measured=measured,
        )
        for slot in {change.slot for change in self.changes}:  # seeds act from birth
            history.alphas[slot] = [self._alpha(slot, step.number) for step in self.steps]
        for change in self.changes:
            if change.cause in ACTIONS:
                op, born = change.cause.upper(), change.blueprint if change.cause == "germinate" else None
                history.actions[change.step] = Action(change.step, op, change.slot, born)
        return [history]

    def _alpha(self, slot: str, trained: int) -> float:
        """1 while a seed acts, which it does from its birth on."""
        stages = [change.target for change in self.changes if change.slot == slot and change.at < trained]
        return float(bool(stages) and stages[-1] in ACTIVE_STAGES)


def read_growth(path: Path) -> GrowthRun:
    """Read the run of a Grower."""
    run = GrowthRun.of(path, read_header(path))
    for line in checked_lines(path / METRICS):
        run.add_metrics(line)
    if not run.steps:
        raise BadValueError(f"{path} has no complete step yet: nothing to report before {METRICS} has a line")
    for line in checked_lines(path / EVENTS):
        run.add_event(line)
    return run


def contributions_of(line: Fields) -> dict[str, Measurement]:
    """Contributions by slot; those that are not finite are omitted."""
    entries = line.inside("contributions")
    found = {}
    for slot in entries:
        value, error = (_number(entries.inside(slot), key) for key in ("value", "error"))
        if value is not None and error is not None:
            found[slot] = Measurement(value, max(0.0, error))
    return found


def _number(line: Fields, key: str) -> float | None:
    """A finite number; None for null, and for the words that stand for other numbers."""
    value = line.get(key)
    return None if value is None or (isinstance(value, str) and value in NOT_FINITE) else line.number(key)


def _step(line: Fields) -> Step:
    return Step(
        line.whole("step"),
        _number(line, "accuracy"),
        _number(line, "loss"),
        line.whole("grown"),
        contributions_of(line),
        _words(line, "remarks"),
    )


def _words(line: Fields, key: str) -> list[str]:
    values = line.get(key, [])
    if not isinstance(values, list):
        raise BadValueError(f"{line.where}: {key!r} is no list")
    return [str(value) for value in values]
