"""A run folder as it lies on the disk, read without anything that trains.

Rounds count from 0, as in the files. A round is complete when `metrics.jsonl` has its line: events of a later one, of
a run that still trains or was killed, are left out. Events are read in one pass; stage changes and curves are kept
for one round only, so a long run needs little memory.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from esper.karn.fields import Fields, Json, is_number, read_object
from esper.leyline import BadValueError, SeedStage, UnknownNameError
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
        """Steps trained before it: ops act before their step's training, ticks and panics after it."""
        return self.step + (self.cause in ("tick", "panic"))


class PanicEvent(NamedTuple):
    """The governor took a host back to its snapshot."""

    step: int
    env: int
    symptoms: list[str]


class Episode(NamedTuple):
    """The life of one host."""

    env: int
    objective: float
    gain: float
    accuracy: float
    added_parameters: float
    accuracies: list[float] | None = None
    """After every step; None where the log has no curves, or for rounds that are not looked at"""
    control_accuracies: list[float] | None = None
    alphas: dict[str, list[float]] | None = None


class Commit(NamedTuple):
    """A seed that stayed."""

    slot: str
    blueprint: str
    germinated: int
    """Steps trained before it was germinated"""
    committed: int


@dataclass(frozen=True)
class Run:
    """What a report is drawn from."""

    path: Path
    config: dict[str, Json]
    git: str | None
    torch: str | None
    rounds: list[Round]
    """Complete ones, in order; at least one"""
    shown: int
    """The round whose stage changes, panics and curves were read"""
    episodes: dict[int, list[Episode]] = field(default_factory=lambda: defaultdict(list))
    commits: dict[int, list[Commit]] = field(default_factory=lambda: defaultdict(list))
    changes: list[StageEvent] = field(default_factory=list)
    panics: list[PanicEvent] = field(default_factory=list)

    def setting(self, *keys: str) -> Json | None:
        """A value of the configuration, or None where this run has no such key."""
        value: Json = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def series(self, column: str) -> list[float | None]:
        """One column over rounds; None where a round has no such number."""
        return [entry.columns.get(column) for entry in self.rounds]

    @cached_property
    def column_names(self) -> list[str]:
        """All columns that any round has, in the order of their first appearance."""
        return list(dict.fromkeys(name for entry in self.rounds for name in entry.columns))

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks of a run that has several, as the metrics tell them apart; otherwise none."""
        parts = [name.split("/") for name in self.column_names]
        return list(dict.fromkeys(part[1] for part in parts if part[0] == "tasks"))

    @cached_property
    def slots(self) -> list[str]:
        """Every slot in which a seed was ever germinated, from the input on."""
        used = {key.split("/")[0] for entry in self.rounds for key in entry.germinated}
        used |= {change.slot for change in self.changes}
        used |= {slot for episode in self.episodes[self.shown] for slot in episode.alphas or {}}
        return sorted(used, key=_place)

    @cached_property
    def steps(self) -> int:
        """Length of the episodes of the shown round."""
        curves = [len(episode.accuracies) for episode in self.episodes[self.shown] if episode.accuracies]
        if curves:
            return max(curves)
        # Every host takes one op per step.
        ops = sum(next(entry.ops for entry in self.rounds if entry.number == self.shown).values())
        counted = ops // max(1, len(self.episodes[self.shown]))
        return max([counted, 1, *(change.at for change in self.changes)])


def read_run(path: Path, shown: int | None = None) -> Run:
    """The run in a folder, with the details of one round (default: the last)."""
    header = read_header(path)
    rounds = list(_read_metrics(path))
    if not rounds:
        raise BadValueError(f"{path} has no complete round yet: nothing to report before {METRICS} has a line")
    numbers = [entry.number for entry in rounds]
    if shown is not None and shown not in numbers:
        raise BadValueError(f"round {shown} is not in {path}; it has rounds {numbers[0]} to {numbers[-1]}")
    run = Run(
        path,
        header.inside("config").content,
        header.optional_text("git"),
        header.optional_text("torch"),
        rounds,
        numbers[-1] if shown is None else shown,
    )
    _read_events(run)
    if not run.episodes[run.shown]:
        raise BadValueError(f"{path / EVENTS} has no episode of round {run.shown}, which {METRICS} calls complete")
    return run


def read_header(path: Path) -> Fields:
    """The configuration of the run in a folder, with the commit and the torch version that it ran with."""
    if not path.is_dir():
        raise BadValueError(f"{path} is no run folder: there is no such folder")
    for name in (CONFIG, METRICS, EVENTS):
        if not (path / name).is_file():
            raise BadValueError(f"{path} is no run folder: it has no {name}")
    header = read_object(path / CONFIG, "configuration of a run")
    header.inside("config").text("task")
    return header


def checked_lines(path: Path) -> Iterator[Fields]:
    """Objects of a file with their places; a torn last line is left out."""
    number = 0
    try:
        for number, content in enumerate(read_lines(path), 1):
            yield Fields(content, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValueError(f"{path} cannot be read behind line {number}: {error}") from error


def metric_lines(path: Path) -> Iterator[tuple[int, Fields]]:
    """The complete rounds of a run: number and line, in order."""
    last = -1
    for line in checked_lines(path / METRICS):
        number = line.whole("round")
        if number <= last:
            raise BadValueError(f"{line.where}: round {number} comes after round {last}")
        yield number, line
        last = number


def _read_metrics(path: Path) -> Iterator[Round]:
    for number, line in metric_lines(path):
        line.number("objective")
        yield Round(number, _flat(line.content), line.counts("ops"), line.counts("germinated"))


def _flat(content: dict[str, Json]) -> dict[str, float]:
    """All numbers but those that have a place of their own."""
    columns: dict[str, float] = {}
    for name, value in content.items():
        if name in ("round", "ops", "germinated"):
            continue
        if isinstance(value, dict):
            columns |= {f"{name}/{key}": item for key, item in _flat(value).items()}
        elif is_number(value):
            columns[name] = float(value)
    return columns


def _read_events(run: Run) -> None:
    complete = {entry.number for entry in run.rounds}
    born: dict[tuple[int, int, str], int] = {}
    kept: dict[tuple[int, int, str], Commit] = {}
    for line in checked_lines(run.path / EVENTS):
        kind = line.text("kind")
        if kind not in ("stage", "panic", "episode"):
            continue  # other kinds may join the log; a report has no picture of them
        number, env = line.whole("round"), line.whole("env")
        if number not in complete:
            continue
        if kind == "episode":
            run.episodes[number].append(_episode(line, env, curves=number == run.shown))
        elif kind == "panic":
            if number == run.shown:
                run.panics.append(PanicEvent(line.whole("step"), env, _names(line, "symptoms")))
        else:
            change = _change(line, env)
            _follow(change, (number, env, change.slot), born, kept)
            if number == run.shown:
                run.changes.append(change)
    for (number, _, _), commit in kept.items():
        run.commits[number].append(commit)


def _follow(
    change: StageEvent,
    key: tuple[int, int, str],
    born: dict[tuple[int, int, str], int],
    kept: dict[tuple[int, int, str], Commit],
) -> None:
    """Keep account of births and commits; a panic takes back what its step did."""
    if change.target is SeedStage.GERMINATED and change.cause != "panic":
        born[key] = change.at
    elif change.target is SeedStage.FOSSILIZED:
        kept[key] = Commit(change.slot, change.blueprint or "unnamed", born.get(key, change.at), change.at)
    elif change.source is SeedStage.FOSSILIZED:
        kept.pop(key, None)


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


def _place(slot: str) -> tuple[int, int, str]:
    """Slots of built-in hosts in the order in which data pass them; others by name, after them."""
    found = re.fullmatch(r"r(\d+)c(\d+)", slot)
    return (int(found[2]), int(found[1]), "") if found else (1_000_000, 0, slot)
