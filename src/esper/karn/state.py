"""The state of a run, folded from its logs line by line: reports and live views are drawn from it.

Rounds count from 0, as in the files. A round is complete when `metrics.jsonl` has its line; events of a round that is
not complete wait for it. Stage changes and curves are stored for one round only, so a long run needs little memory.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from esper.karn.fields import Fields, Json, is_number, read_object
from esper.leyline import BadValueError, SeedStage, UnknownNameError
from esper.leyline.records import config_checksum
from esper.storage.logs import read_lines

CONFIG, EVENTS, METRICS = "config.json", "events.jsonl", "metrics.jsonl"


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
    accuracies: list[float] | None = None
    """After every step; None if the log has no curves, or in rounds whose details are not stored"""
    control_accuracies: list[float] | None = None
    alphas: dict[str, list[float]] | None = None


class Commit(NamedTuple):
    """A committed seed."""

    slot: str
    blueprint: str
    germinated: int
    """Steps trained before it was germinated"""
    committed: int


Key = tuple[int, int, str]
"""Round, env and slot."""


@dataclass
class RunState:
    """What is known of a run so far. `fold_metrics` and `fold_event` take in one line each."""

    path: Path
    config: dict[str, Json]
    git: str | None = None
    torch: str | None = None
    detail_round: int | None = None
    """The round whose stage changes, panics and curves are stored; None follows the latest complete one"""
    rounds: list[Round] = field(default_factory=list)
    """Complete rounds, in order"""
    episodes: dict[int, list[Episode]] = field(default_factory=lambda: defaultdict(list))
    changes: list[StageEvent] = field(default_factory=list)
    panics: list[PanicEvent] = field(default_factory=list)
    _births: dict[Key, int] = field(default_factory=dict)
    _commits: dict[Key, Commit] = field(default_factory=dict)
    _complete: set[int] = field(default_factory=set)
    _columns: dict[str, None] = field(default_factory=dict)
    _waiting: dict[int, list[Fields]] = field(default_factory=lambda: defaultdict(list))
    """Events of rounds that are not complete"""

    @property
    def shown(self) -> int:
        """The round whose details are stored."""
        return self.rounds[-1].number if self.detail_round is None else self.detail_round

    def fold_metrics(self, line: Fields) -> None:
        """Take in a line of `metrics.jsonl`: a round is complete."""
        number, columns = line.whole("round"), _flat(line.content)
        line.number("objective")
        self.rounds.append(Round(number, columns, line.counts("ops"), line.counts("germinated")))
        self._complete.add(number)
        self._columns |= dict.fromkeys(columns)
        if self.detail_round is None:
            self.changes.clear()
            self.panics.clear()
        for event in self._waiting.pop(number, []):
            self.fold_event(event)

    def fold_event(self, line: Fields) -> None:
        """Take in a line of `events.jsonl`. Kinds that nothing is drawn from are skipped."""
        kind = line.text("kind")
        if kind not in ("stage", "panic", "episode"):
            return
        number, env = line.whole("round"), line.whole("env")
        if number not in self._complete:
            self._waiting[number].append(line)
        elif kind == "episode":
            self.episodes[number].append(_episode(line, env, curves=number == self.shown))
        elif kind == "stage":
            change = _change(line, env)
            self._follow(change, (number, env, change.slot))
            if number == self.shown:
                self.changes.append(change)
        elif number == self.shown:
            self.panics.append(PanicEvent(line.whole("step"), env, _names(line, "symptoms")))

    def _follow(self, change: StageEvent, key: Key) -> None:
        """Note births and commits. A panic undoes what its step did."""
        if change.target is SeedStage.GERMINATED and change.cause != "panic":
            self._births[key] = change.at
        elif change.target is SeedStage.FOSSILIZED:
            born = self._births.get(key, change.at)
            self._commits[key] = Commit(change.slot, change.blueprint or "unnamed", born, change.at)
        elif change.source is SeedStage.FOSSILIZED:
            self._commits.pop(key, None)

    @property
    def commits(self) -> dict[int, list[Commit]]:
        """Committed seeds by round."""
        by_round: dict[int, list[Commit]] = defaultdict(list)
        for (number, _, _), commit in self._commits.items():
            by_round[number].append(commit)
        return by_round

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
    def column_names(self) -> list[str]:
        """All columns that any round has, in the order of their first appearance."""
        return list(self._columns)

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
        used |= {slot for episode in self.episodes[self.shown] for slot in episode.alphas or {}}
        return sorted(used, key=_depth)

    @property
    def steps(self) -> int:
        """Length of the episodes of the shown round."""
        curves = [len(episode.accuracies) for episode in self.episodes[self.shown] if episode.accuracies]
        if curves:
            return max(curves)
        # Every host takes one op per step.
        ops = sum(next(entry.ops for entry in self.rounds if entry.number == self.shown).values())
        counted = ops // max(1, len(self.episodes[self.shown]))
        return max([counted, 1, *(change.at for change in self.changes)])


def read_run(path: Path, shown: int | None = None) -> RunState:
    """Fold the run in a folder, with the details of one round (default: the last)."""
    header = read_header(path)
    state = RunState(
        path,
        header.inside("config").content,
        git=header.optional_text("git"),
        torch=header.optional_text("torch"),
        detail_round=shown,
    )
    for _, line in metric_lines(path):
        state.fold_metrics(line)
    if not state.rounds:
        raise BadValueError(f"{path} has no complete round yet: nothing to report before {METRICS} has a line")
    numbers = [entry.number for entry in state.rounds]
    if shown is not None and shown not in numbers:
        raise BadValueError(f"round {shown} is not in {path}; it has rounds {numbers[0]} to {numbers[-1]}")
    for line in checked_lines(path / EVENTS):
        state.fold_event(line)
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
    header.inside("config").text("task")
    if header.text("checksum") != config_checksum(header.content):
        raise BadValueError(f"{path / CONFIG} was changed after the run began; restore what was written")
    return header


def checked_lines(path: Path) -> Iterator[Fields]:
    """Yield the objects of a file with their line numbers. A torn last line is skipped."""
    number = 0
    try:
        for number, content in enumerate(read_lines(path), 1):
            yield Fields(content, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValueError(f"{path} cannot be read behind line {number}: {error}") from error


def metric_lines(path: Path) -> Iterator[tuple[int, Fields]]:
    """Yield the complete rounds of a run: number and line, in order."""
    last = -1
    for line in checked_lines(path / METRICS):
        number = line.whole("round")
        if number <= last:
            raise BadValueError(f"{line.where}: round {number} comes after round {last}")
        yield number, line
        last = number


def _flat(content: dict[str, Json]) -> dict[str, float]:
    """All numbers of a line by name, `outer/inner` for nested ones; ops and germinations have fields of their own."""
    columns: dict[str, float] = {}
    for name, value in content.items():
        if name in ("round", "ops", "germinated"):
            continue
        if isinstance(value, dict):
            columns |= {f"{name}/{key}": item for key, item in _flat(value).items()}
        elif is_number(value):
            columns[name] = float(value)
    return columns


def _change(line: Fields, env: int) -> StageEvent:
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
    objective, gain, accuracy, added = (
        line.number(key) for key in ("objective", "gain", "accuracy", "added_parameters")
    )
    if not curves:
        return Episode(env, objective, gain, accuracy, added)
    accuracies, control = line.optional_numbers("accuracies"), line.optional_numbers("control_accuracies")
    if accuracies is not None and control is not None and len(accuracies) != len(control):
        raise BadValueError(f"{line.where}: {len(accuracies)} accuracies, but {len(control)} of the control")
    alphas = None
    if "alphas" in line:
        inner = line.inside("alphas")
        alphas = {slot: inner.numbers(slot) for slot in inner.content}
    return Episode(env, objective, gain, accuracy, added, accuracies, control, alphas)


def _names(line: Fields, key: str) -> list[str]:
    value = line.content.get(key, [])
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _depth(slot: str) -> tuple[int, int, str]:
    """Sort key: slots of built-in hosts in the order in which data pass them, then others by name."""
    match = re.fullmatch(r"r(\d+)c(\d+)", slot)
    return (int(match[2]), int(match[1]), "") if match else (1_000_000, 0, slot)
