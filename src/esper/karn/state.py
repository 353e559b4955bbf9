"""The state of a run, read from its logs: reports are drawn from it.

Rounds count from 0, as in the files. A round is complete when `metrics.jsonl` has its line; events of other rounds are
skipped. Stage changes and curves are stored for one round only, so a long run needs little memory.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

from esper.karn.fields import Fields, checked_lines, is_number, read_object
from esper.karn.front_cache import Front
from esper.karn.histories import HostHistory, LiveRound, by_env, history_of
from esper.karn.lines import (
    Alarm,
    Commit,
    Episode,
    Followed,
    PanicEvent,
    StageEvent,
    alarm_of,
    commits_of,
    episode_of,
    followed_of,
    panic_of,
)
from esper.karn.stage_columns import changes_of
from esper.leyline import BadValueError
from esper.leyline.records import Json, config_checksum, flatten

CONFIG, EVENTS, METRICS = "config.json", "events.jsonl", "metrics.jsonl"
HEADLINES = ("objective", "objective_std", "gain", "accuracy", "added_parameters", "committed", "panics")
"""Columns that every round has"""
GROWER = "grower"
"""Kind of run, in the configuration: steps of one model in its user's loop. Training runs have rounds and no kind"""
DRAWN = ("panic", "episode", "followed", "alarm")
"""Kinds of events that are drawn"""
Counter = Literal["round", "step"]
"""What the lines of the metrics count"""

# -- the run ----------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """A line of the metrics."""

    number: int
    columns: dict[str, float]
    """Every number in it; those of nested objects as `outer/inner`"""
    ops: dict[str, int]
    germinated: dict[str, int]
    """`slot/blueprint` → germinations"""


@dataclass
class RunState:
    """What the logs tell of a run, folded from their lines, and the round that is being played."""

    counter: ClassVar[Counter] = "round"
    path: Path
    config: dict[str, Json]
    git: str | None = None
    torch: str | None = None
    rounds: list[Round] = field(default_factory=list)
    """Complete rounds, in order"""
    shown: int = -1
    """The round whose stage changes, panics and curves are stored"""
    episodes: dict[int, list[Episode]] = field(default_factory=lambda: defaultdict(list))
    changes: list[StageEvent] = field(default_factory=list)
    panics: list[PanicEvent] = field(default_factory=list)
    followed: dict[int, Followed] = field(default_factory=dict)
    """By env of the shown round; of the first few"""
    alarms: list[Alarm] = field(default_factory=list)
    live: LiveRound | None = None
    """The round that is being played"""
    _columns: dict[str, None] = field(default_factory=dict)
    _commits: dict[int, dict[tuple[int, str], Commit]] = field(default_factory=lambda: defaultdict(dict))
    _drawn: list[HostHistory] | None = None

    @classmethod
    def of(cls, path: Path, header: Fields) -> Self:
        """The state of a run before its first line."""
        return cls(path, header.inside("config"), header.optional_text("git"), header.optional_text("torch"))

    @property
    def column_names(self) -> list[str]:
        """All columns that any round has, in the order of their first appearance."""
        return list(self._columns)

    @property
    def complete(self) -> int:
        """The newest complete round; −1 before the first."""
        return self.rounds[-1].number if self.rounds else -1

    def has(self, number: int) -> bool:
        """Whether a round is complete."""
        index = bisect_left(self.rounds, number, key=lambda entry: entry.number)
        return index < len(self.rounds) and self.rounds[index].number == number

    def show(self, number: int) -> None:
        """Store the details of this round from now on, and drop those of another."""
        if number != self.shown:
            plain = [episode.without_curves() for episode in self.episodes.get(self.shown, [])]
            if plain:
                self.episodes[self.shown] = plain
            self.shown, self.changes, self.panics, self.followed = number, [], [], {}
        self._drawn = None

    def add_metrics(self, line: Fields) -> None:
        """Add a line of `metrics.jsonl`: a complete round."""
        entry = _round(line)
        if entry.number <= self.complete:
            raise BadValueError(f"{line.where}: round {entry.number} comes after round {self.complete}")
        self.rounds.append(entry)
        self._columns |= dict.fromkeys(entry.columns)

    def add_event(self, line: Fields) -> None:
        """Add a line of `events.jsonl`, if its round is complete and its kind is drawn."""
        kind = line.text("kind")
        if kind not in DRAWN or not self.has(number := line.whole("round")):
            return
        self._drawn = None
        if kind == "alarm":
            self.alarms.append(alarm_of(line))
            return
        env = line.whole("env")
        if kind == "episode":
            self._add_episode(number, episode_of(line, env, curves=number == self.shown), changes_of(line, env))
        elif number == self.shown and kind == "panic":
            self.panics.append(panic_of(line, env))
        elif number == self.shown:
            self.followed[env] = followed_of(line)

    def _add_episode(self, number: int, episode: Episode, changes: list[StageEvent]) -> None:
        self.episodes[number].append(episode)
        for commit in commits_of(changes):
            self._commits[number][episode.env, commit.slot] = commit
        if number == self.shown:
            self.changes += changes

    def forget_details(self) -> None:
        """Drop what is stored of the shown round, before its lines are read again."""
        self.episodes.pop(self.shown, None)
        self._commits.pop(self.shown, None)
        self.changes, self.panics, self.followed, self._drawn = [], [], {}, None

    def front(self, end: int, lines: int, places: Mapping[int, tuple[int, int]]) -> Front:
        """What is known of the rounds with these places, to be stored."""
        return Front(
            end,
            lines,
            {number: self.episodes[number] for number in places if number in self.episodes},
            {
                number: [(env, commit) for (env, _), commit in self._commits[number].items()]
                for number in places
                if self._commits.get(number)
            },
            [alarm for alarm in self.alarms if alarm.round in places],
            places,
        )

    def add_front(self, front: Front) -> None:
        """Add what was stored of earlier rounds."""
        for number, episodes in front.episodes.items():
            self.episodes.setdefault(number, list(episodes))
        for number, commits in front.commits.items():
            self._commits[number] |= {(env, commit.slot): commit for env, commit in commits}
        self.alarms = [*front.alarms, *self.alarms]
        self._drawn = None

    def begin_live(self, number: int) -> None:
        """A round begins to be played."""
        self.live = LiveRound(number)

    @property
    def playing(self) -> LiveRound | None:
        """The round that is being played, unless it is complete."""
        return self.live if self.live is not None and self.live.number > self.complete and self.live.hosts else None

    def histories(self) -> list[HostHistory]:
        """The hosts of the shown round, in order."""
        if self._drawn is None:
            changes, panics = by_env(self.changes), by_env(self.panics)
            self._drawn = [
                history_of(episode, changes.get(episode.env, []), panics.get(episode.env, []), self.followed)
                for episode in sorted(self.episodes.get(self.shown, []), key=lambda episode: episode.env)
                if episode.accuracies
            ]
        return self._drawn

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
        used |= {slot for episode in self.episodes.get(self.shown, []) for slot in episode.alphas}
        if self.live is not None:
            used |= set(self.live.slots)
        return sorted(used, key=_depth)

    @property
    def steps(self) -> int:
        """Length of the episodes of the shown round."""
        return max((len(episode.accuracies) for episode in self.episodes.get(self.shown, [])), default=0)


def read_run(path: Path, shown: int | None = None, *, rounds_needed: bool = True) -> RunState:
    """Read the run in a folder, with the details of one round (default: the last).

    Without `rounds_needed`, a run that has no complete round yet is read too; it shows round −1."""
    header = read_header(path)
    if is_of_grower(header):
        raise BadValueError(f"{path} is the folder of a Grower: it has steps of one model, not rounds of hosts")
    state = RunState.of(path, header)
    for line in checked_lines(path / METRICS):
        state.add_metrics(line)
    if not state.rounds and not rounds_needed:
        return state
    if not state.rounds:
        raise BadValueError(f"{path} has no complete round yet: nothing to report before {METRICS} has a line")
    state.show(state.complete if shown is None else shown)
    if not state.has(state.shown):
        raise BadValueError(
            f"round {shown} is not in {path}; it has rounds {state.rounds[0].number} to {state.complete}"
        )
    for line in checked_lines(path / EVENTS):
        state.add_event(line)
    if not state.episodes[state.shown]:
        raise BadValueError(f"{path / EVENTS} has no episode of round {state.shown}, which {METRICS} calls complete")
    return state


def read_header(path: Path, *, logs_needed: bool = True) -> Fields:
    """The configuration of the run in a folder, with the commit and the torch version that it ran with."""
    if not path.is_dir():
        raise BadValueError(f"{path} is no run folder: there is no such folder")
    for name in (CONFIG, METRICS, EVENTS) if logs_needed else (CONFIG,):
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


def metric_lines(path: Path, counter: Counter = "round") -> Iterator[Fields]:
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


def _depth(slot: str) -> tuple[int, int, str]:
    """Sort key: slots of built-in hosts in the order in which data pass them, then others by name."""
    match = re.fullmatch(r"r(\d+)c(\d+)", slot)
    return (int(match[2]), int(match[1]), "") if match else (1_000_000, 0, slot)
