"""The state of a run, read from its logs: reports are drawn from it.

Rounds count from 0, as in the files. A round is complete when `metrics.jsonl` has its line; events of other rounds are
skipped. Stage changes and curves are stored for one round only, so a long run needs little memory.
`Fields` checks the JSON that others wrote where its values are taken; a wrong one is named with its place.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeGuard

from esper.leyline import BadValueError, SeedStage, UnknownNameError
from esper.leyline.records import Json, config_checksum, flatten, refuse_constant
from esper.storage.logs import read_lines

CONFIG, EVENTS, METRICS = "config.json", "events.jsonl", "metrics.jsonl"
HEADLINES = ("objective", "objective_std", "gain", "accuracy", "added_parameters", "committed", "panics")
"""Columns that every round has"""
GROWER = "grower"
"""Kind of run, in the configuration: steps of one model in its user's loop. Training runs have rounds and no kind"""
COUNTS = range(2**63)
"""What a count may be: pictures and databases take no larger numbers"""
DRAWN = ("stage", "panic", "episode")  # kinds of events that reports are drawn from


class Fields(dict[str, Json]):
    """A JSON object, and where it comes from: a file, or a file and its line."""

    def __init__(self, content: Json, where: str) -> None:
        if not isinstance(content, dict):
            raise BadValueError(f"{where} is no JSON object, but {_short(content)}")
        super().__init__(content)
        self.where = where

    def _take(self, key: str, is_right: Callable[[Json], bool], wanted: str) -> Json:
        if is_right(self.get(key)):
            return self[key]
        if key not in self:
            raise BadValueError(f"{self.where} has no {key!r}; it should be {wanted}")
        raise BadValueError(f"{self.where}: {key!r} is {_short(self[key])}, not {wanted}")

    def number(self, key: str) -> float:
        """A finite number."""
        return float(self._take(key, is_number, "a finite number"))

    def whole(self, key: str) -> int:
        """An integer of 0 or more."""
        return int(self._take(key, lambda value: type(value) is int and value in COUNTS, "an integer of 0 or more"))

    def text(self, key: str) -> str:
        """A string."""
        return str(self._take(key, lambda value: isinstance(value, str), "a string"))

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        values = self._take(
            key, lambda value: isinstance(value, list) and all(map(is_number, value)), "a list of finite numbers"
        )
        return [float(value) for value in values]

    def optional_text(self, key: str) -> str | None:
        """A string, or None if there is none."""
        return None if self.get(key) is None else self.text(key)

    def counts(self, key: str) -> dict[str, int]:
        """Counts by name; empty if the key is missing."""
        values = self.get(key, {})
        if not isinstance(values, dict) or not all(is_number(count) and count >= 0 for count in values.values()):
            raise BadValueError(f"{self.where}: {key!r} is {_short(values)}, not an object of counts")
        return {name: int(count) for name, count in values.items()}

    def objects(self, key: str) -> list["Fields"]:
        """A list of objects; empty if the key is missing."""
        values = self._take(key, lambda value: isinstance(value, list), "a list of objects") if key in self else []
        return [Fields(value, f"{self.where}, {key}[{index}]") for index, value in enumerate(values)]

    def inside(self, key: str) -> "Fields":
        """The object under a key."""
        return Fields(self.get(key), f"{self.where}, {key}")


def is_number(value: Json) -> TypeGuard[float]:
    """Whether a value is a finite number, and no bool."""
    # Compared, because an integer may be too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_object(path: Path, what: str) -> Fields:
    """Read a file with one JSON object. `what` names the kind of file in errors."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or no UTF-8
        raise BadValueError(f"{path} is no {what}: {error}") from error
    return Fields(content, str(path))


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# -- the run ----------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """A line of the metrics."""

    number: int
    columns: dict[str, float]
    """Every number in it; those of nested objects as `outer/inner`"""
    ops: dict[str, int]
    germinated: dict[str, int]
    """`slot/blueprint` → germinations"""


class StageEvent(NamedTuple):
    """A seed went from one stage to another."""

    step: int
    env: int
    slot: str
    blueprint: str | None
    source: SeedStage
    target: SeedStage
    cause: str

    @property
    def at(self) -> int:
        """Steps trained before it. Ops act before their step's training, ticks and panics after it."""
        return self.step + (self.cause in ("tick", "panic"))


class PanicEvent(NamedTuple):
    """The governor restored a host's snapshot."""

    step: int
    env: int
    symptoms: list[str]


class Episode(NamedTuple):
    """One host from its first step to its last."""

    env: int
    objective: float
    gain: float
    accuracy: float
    added_parameters: float
    accuracies: Sequence[float] = ()
    """After every step; curves are empty in rounds whose details are not stored"""
    control_accuracies: Sequence[float] = ()
    alphas: Mapping[str, Sequence[float]] = MappingProxyType({})


class Commit(NamedTuple):
    """A committed seed."""

    slot: str
    blueprint: str
    germinated: int
    """Steps trained before it was germinated"""
    committed: int


@dataclass
class RunState:
    """What the logs tell of a run."""

    path: Path
    config: dict[str, Json]
    git: str | None
    torch: str | None
    rounds: list[Round]
    """Complete rounds, in order"""
    shown: int
    """The round whose stage changes, panics and curves are stored"""
    episodes: dict[int, list[Episode]] = field(default_factory=lambda: defaultdict(list))
    changes: list[StageEvent] = field(default_factory=list)
    panics: list[PanicEvent] = field(default_factory=list)
    _births: dict[tuple[int, int, str], int] = field(default_factory=dict)
    _commits: dict[int, dict[tuple[int, str], Commit]] = field(default_factory=lambda: defaultdict(dict))

    @cached_property
    def column_names(self) -> list[str]:
        """All columns that any round has, in the order of their first appearance."""
        return list(dict.fromkeys(name for entry in self.rounds for name in entry.columns))

    def add_event(self, line: Fields) -> None:
        """Add a line of `events.jsonl`, of one of the kinds in `DRAWN`."""
        kind, number, env = line.text("kind"), line.whole("round"), line.whole("env")
        if kind == "episode":
            self.episodes[number].append(_episode(line, env, curves=number == self.shown))
        elif kind == "stage":
            self._add_change(number, change_of(line, env))
        elif number == self.shown:
            symptoms = line.get("symptoms", [])
            names = [str(name) for name in symptoms] if isinstance(symptoms, list) else [str(symptoms)]
            self.panics.append(PanicEvent(line.whole("step"), env, names))

    def _add_change(self, number: int, change: StageEvent) -> None:
        """Update births and commits. A panic may undo either."""
        key = change.env, change.slot
        if change.target is SeedStage.GERMINATED and change.cause != "panic":
            self._births[number, *key] = change.at
        elif change.target is SeedStage.FOSSILIZED:
            born = self._births.get((number, *key), change.at)
            self._commits[number][key] = Commit(change.slot, change.blueprint or "unnamed", born, change.at)
        elif change.source is SeedStage.FOSSILIZED:
            self._commits[number].pop(key, None)
        if number == self.shown:
            self.changes.append(change)

    @property
    def commits(self) -> dict[int, list[Commit]]:
        """Committed seeds by round."""
        return {number: list(commits.values()) for number, commits in self._commits.items()}

    def setting(self, *keys: str) -> Json | None:
        """A value of the configuration, or None if this run has no such key."""
        value: Json = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def series(self, column: str) -> list[float | None]:
        """One column over rounds; None where a round has no such number."""
        return [entry.columns.get(column) for entry in self.rounds]

    @property
    def tasks(self) -> list[str]:
        """The tasks of a run that has several; empty for a single one."""
        parts = [name.split("/") for name in self.column_names]
        return list(dict.fromkeys(part[1] for part in parts if part[0] == "tasks"))

    @property
    def slots(self) -> list[str]:
        """Every slot in which a seed was germinated, from the input on."""
        used = {key.split("/")[0] for entry in self.rounds for key in entry.germinated}
        used |= {change.slot for change in self.changes}
        used |= {slot for episode in self.episodes[self.shown] for slot in episode.alphas}
        return sorted(used, key=_depth)

    @property
    def steps(self) -> int:
        """Length of the episodes of the shown round."""
        return max(len(episode.accuracies) for episode in self.episodes[self.shown])


def read_run(path: Path, shown: int | None = None, *, rounds_needed: bool = True) -> RunState:
    """Read the run in a folder, with the details of one round (default: the last).

    Without `rounds_needed`, a run that has no complete round yet is read too; it shows round −1."""
    header = read_header(path)
    if is_of_grower(header):
        raise BadValueError(f"{path} is the folder of a Grower: it has steps of one model, not rounds of hosts")
    git, torch_version = map(header.optional_text, ("git", "torch"))
    rounds = [_round(line) for line in metric_lines(path)]
    if not rounds and not rounds_needed:
        return RunState(path, header.inside("config"), git, torch_version, [], -1)
    if not rounds:
        raise BadValueError(f"{path} has no complete round yet: nothing to report before {METRICS} has a line")
    numbers = {entry.number for entry in rounds}
    shown = max(numbers) if shown is None else shown
    if shown not in numbers:
        raise BadValueError(f"round {shown} is not in {path}; it has rounds {min(numbers)} to {max(numbers)}")
    state = RunState(path, header.inside("config"), git, torch_version, rounds, shown)
    for line in checked_lines(path / EVENTS):
        if line.text("kind") in DRAWN and line.whole("round") in numbers:
            state.add_event(line)
    if not state.episodes[state.shown]:
        raise BadValueError(f"{path / EVENTS} has no episode of round {state.shown}, which {METRICS} calls complete")
    return state


def read_header(path: Path) -> Fields:
    """The configuration of the run in a folder, with the commit and the torch version that it ran with."""
    if not path.is_dir():
        raise BadValueError(f"{path} is no run folder: there is no such folder")
    for name in (CONFIG, METRICS, EVENTS):
        if not (path / name).is_file():
            raise BadValueError(f"{path} is no run folder: it has no {name}")
    header = read_object(path / CONFIG, "configuration of a run")
    header.inside("config").text("host" if is_of_grower(header) else "task")
    if header.text("checksum") != config_checksum(header):
        raise BadValueError(f"{path / CONFIG} was changed after the run began; restore what was written")
    return header


def is_of_grower(header: Fields) -> bool:
    """Whether a run is that of a Grower."""
    return header.get("kind") == GROWER


def checked_lines(path: Path) -> Iterator[Fields]:
    """Yield the objects of a file with their line numbers. A torn last line is skipped."""
    number = 0
    try:
        for number, content in enumerate(read_lines(path), 1):
            yield Fields(content, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValueError(f"{path} cannot be read behind line {number}: {error}") from error


def metric_lines(path: Path, counter: Literal["round", "step"] = "round") -> Iterator[Fields]:
    """Yield the lines of the complete rounds of a run, or of the complete steps of a Grower, in order."""
    last = -1
    for line in checked_lines(path / METRICS):
        number = line.whole(counter)
        if number <= last:
            raise BadValueError(f"{line.where}: {counter} {number} comes after {counter} {last}")
        yield line
        last = number


def _round(line: Fields) -> Round:
    for name in HEADLINES:
        line.number(name)
    columns = {
        name: float(value) for name, value in flatten(line, skip=("round", "ops", "germinated")) if is_number(value)
    }
    return Round(line.whole("round"), columns, line.counts("ops"), line.counts("germinated"))


def change_of(line: Fields, env: int) -> StageEvent:
    """The change of stage in a line of `events.jsonl`."""
    return StageEvent(
        line.whole("step"),
        env,
        line.text("slot"),
        line.optional_text("blueprint"),
        _stage(line, "source"),
        _stage(line, "target"),
        line.text("cause"),
    )


def _stage(line: Fields, key: str) -> SeedStage:
    name = line.text(key)
    if name not in SeedStage.__members__:
        raise UnknownNameError(f"stage ({line.where}, {key})", name, SeedStage.__members__)
    return SeedStage[name]


def _episode(line: Fields, env: int, *, curves: bool) -> Episode:
    objective, gain, accuracy, added = map(line.number, ("objective", "gain", "accuracy", "added_parameters"))
    if not curves:
        return Episode(env, objective, gain, accuracy, added)
    accuracies, control, alphas = line.numbers("accuracies"), line.numbers("control_accuracies"), line.inside("alphas")
    if len(accuracies) != len(control):
        raise BadValueError(f"{line.where}: {len(accuracies)} accuracies, but {len(control)} of the control")
    by_slot = {slot: alphas.numbers(slot) for slot in alphas}
    return Episode(env, objective, gain, accuracy, added, accuracies, control, by_slot)


def _depth(slot: str) -> tuple[int, int, str]:
    """Sort key: slots of built-in hosts in the order in which data pass them, then others by name."""
    match = re.fullmatch(r"r(\d+)c(\d+)", slot)
    return (int(match[2]), int(match[1]), "") if match else (1_000_000, 0, slot)
