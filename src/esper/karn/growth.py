"""The run of a Grower, read from its folder: steps of one model. They count from 1, as they were printed.

A step is complete when `metrics.jsonl` has its line; events of other steps are skipped.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from esper.karn.state import (
    EVENTS,
    METRICS,
    Fields,
    PanicEvent,
    StageEvent,
    change_of,
    checked_lines,
    metric_lines,
    read_header,
)
from esper.leyline import BadValueError, Measurement
from esper.leyline.records import NOT_FINITE


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
    """What the logs tell of a Grower's run."""

    path: Path
    config: Fields
    git: str | None
    torch: str | None
    begins_after: int
    """Steps before the log began"""
    steps: list[Step]
    changes: list[StageEvent] = field(default_factory=list)
    panics: list[PanicEvent] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def slots(self) -> list[str]:
        """All slots, in the order in which the data passes them."""
        return list(dict.fromkeys([*self.config.inside("slots"), *(change.slot for change in self.changes)]))


def read_growth(path: Path) -> GrowthRun:
    """Read the run of a Grower."""
    header = read_header(path)
    config = header.inside("config")
    for name in ("budget", "steps", "host_parameters"):
        config.whole(name)
    config.inside("slots")
    git, torch_version = map(header.optional_text, ("git", "torch"))
    steps = [_step(line) for line in metric_lines(path, "step")]
    if not steps:
        raise BadValueError(f"{path} has no complete step yet: nothing to report before {METRICS} has a line")
    run = GrowthRun(path, config, git, torch_version, header.whole("begins_after"), steps)
    numbers = {step.number for step in steps}
    for line in checked_lines(path / EVENTS):
        kind = line.text("kind")
        if kind in ("stage", "panic", "finished") and line.whole("step") in numbers:
            _add_event(run, kind, line)
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


def _add_event(run: GrowthRun, kind: str, line: Fields) -> None:
    # A timeline puts ticks and panics behind the training of their step. Here a step is counted when it is trained.
    step = line.whole("step")
    if kind == "stage":
        change = change_of(line, 0)
        run.changes.append(change._replace(step=step - (change.at - change.step)))
    elif kind == "panic":
        run.panics.append(PanicEvent(step - 1, 0, _words(line, "symptoms")))
    else:
        run.finish = Finish(_words(line, "kept"), _words(line, "dropped"))


def _words(line: Fields, key: str) -> list[str]:
    values = line.get(key, [])
    if not isinstance(values, list):
        raise BadValueError(f"{line.where}: {key!r} is no list")
    return [str(value) for value in values]
