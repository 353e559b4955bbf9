"""The folder of a run: its configuration, its logs, its checkpoints."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from esper.leyline import BadValueError, CheckpointError, StorageError
from esper.leyline.records import Json, decode, encode
from esper.simic.agent import PPOAgent, load_agent, save_agent
from esper.simic.agent.checkpoint import AGENT
from esper.simic.telemetry import AlarmLimits, Detail, DetectorState
from esper.simic.training.config import TrainConfig
from esper.storage.files import folder_lock, is_leftover, remove_leftovers, replace_file, storage_errors
from esper.storage.interrupts import interrupts_held
from esper.storage.logs import JsonLines, digest_of, read_lines
from esper.storage.series import KEEP, Series
from esper.storage.stored import Machine, checkpoint_errors, checksum, read_stored
from esper.tolaria import get_task
from esper.tolaria.data import data_digest

CONFIG = "config.json"
PATHS = ("data_dir", "start")
"""Settings that are paths; JSON holds them as text."""


class Header(NamedTuple):
    """What `config.json` tells."""

    config: TrainConfig
    keep_checkpoints: int


def write_config(path: Path, config: TrainConfig, keep_checkpoints: int) -> None:
    """Write the resolved configuration of a run, whole or not at all."""
    # What a run started from is found from its own folder: both may be moved together.
    start = None if config.start is None else os.path.relpath(config.start.resolve(), path.resolve())
    data_dir = None if config.data_dir is None else str(config.data_dir.resolve())
    content = {
        "config": encode({**asdict(config), "start": start, "data_dir": data_dir}),
        "keep_checkpoints": keep_checkpoints,
        "git": git_hash(),
        "torch": torch.__version__,
    }
    content["checksum"] = _config_checksum(content)
    replace_file(path / CONFIG, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _start_of(path: Path, text: str | None) -> Path | None:
    """Older folders hold it as it was given, from a working folder that nobody knows."""
    if text is None:
        return None
    start = Path(os.path.normpath(path.resolve() / text))
    return Path(text) if Path(text).is_dir() and not start.is_dir() else start


def _config_checksum(content: Mapping[str, Json]) -> str:
    """Over everything but where data sets lie, which may differ from machine to machine."""
    config = {name: value for name, value in content["config"].items() if name != "data_dir"}
    return checksum({**{name: value for name, value in content.items() if name != "checksum"}, "config": config})


def read_config(path: Path) -> TrainConfig:
    """The resolved configuration of a run."""
    return read_header(path).config


def check_settings(path: Path, config: TrainConfig) -> None:
    """Raise unless these are the settings that a run was begun with; where data lie may differ."""
    begun = read_config(path)
    differ = [
        f"{each.name} {getattr(config, each.name)!r}, begun with {getattr(begun, each.name)!r}"
        for each in fields(TrainConfig)
        if each.name != "data_dir" and _absolute(getattr(config, each.name)) != _absolute(getattr(begun, each.name))
    ]
    if differ:
        raise BadValueError(
            f"{path} cannot go on with other settings ({'; '.join(differ)}): take its own, or another folder"
        )


def _absolute(value: object) -> object:
    return value.resolve() if isinstance(value, Path) else value


def read_header(path: Path) -> Header:
    """The configuration, proven to be what was written. Older folders state no checksum, no start and no limits of
    alarms, and keep all checkpoints."""
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        values = dict(content["config"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise BadValueError(f"{path} is no run folder: {CONFIG} is missing or damaged ({error})") from error
    with checkpoint_errors(str(path / CONFIG)):
        if "checksum" in content and content["checksum"] != (found := _config_checksum(content)):
            raise CheckpointError(
                f"{path / CONFIG} was changed: it states checksum {content['checksum']!r}, its content has {found}; "
                "put back what was written, or begin anew in another folder"
            )
    values.setdefault("alarms", encode(AlarmLimits()))
    data_dir, start = (values.pop(name, None) for name in PATHS)
    config: TrainConfig = decode(TrainConfig, {**values, **dict.fromkeys(PATHS)}, "config")
    keep = decode(int, content.get("keep_checkpoints", sys.maxsize), "keep_checkpoints")
    place = None if data_dir is None else Path(data_dir)
    return Header(replace(config, data_dir=place, start=_start_of(path, start)), keep)


def git_hash() -> str | None:
    """The commit that the code is at, where it lies in a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


EVENTS, METRICS, CHECKPOINTS = "events.jsonl", "metrics.jsonl", "checkpoints"
SESSIONS = "sessions.jsonl"
"""Append-only, never cut: how often a run was stopped and resumed is no part of what it computes."""


@dataclass(frozen=True)
class LogState:
    """How far a log was, and what it held."""

    size: int
    sha256: str

    @classmethod
    def of(cls, log: JsonLines) -> Self:
        """Of a log whose lines are on the disk."""
        return cls(log.flush(), log.sha256)


@dataclass(frozen=True)
class Progress:
    """Where a run was when a checkpoint was written."""

    rounds: int
    events: LogState
    metrics: LogState
    machine: Machine
    data: tuple[str, ...]
    """Digests of the data sets, task by task"""


@dataclass(frozen=True)
class TelemetryState:
    """What the detector of anomalies remembers."""

    detector: DetectorState = field(default_factory=DetectorState)
    detail: Detail = field(default_factory=Detail)


EXTRAS: dict[str, type] = {"progress": Progress, "watching": TelemetryState}
"""What lies beside the agent in a run's checkpoint."""


class Restored(NamedTuple):
    """What a run goes on with."""

    agent: PPOAgent
    rounds: int
    """How many it has behind it"""
    watching: TelemetryState
    remarks: tuple[str, ...] = ()
    """What is not as it was: damaged checkpoints, another machine"""


class RunFolder:
    """One run on disk, this process's alone. Use it as a context manager: it closes its files and lets go of it."""

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        keep_checkpoints: int,
        taken: ExitStack,
        offsets: tuple[int, int] | None = None,
    ) -> None:
        """`taken` holds the folder's lock; the caller keeps it where this fails. Logs are cut at the offsets."""
        self.path, self.config = path, config
        self.checkpoints = checkpoints_of(path, keep_checkpoints)
        events, metrics = offsets if offsets is not None else (None, None)
        self.events = taken.enter_context(JsonLines(path / EVENTS, events))
        self.metrics = taken.enter_context(JsonLines(path / METRICS, metrics))
        self._opened = taken.pop_all()

    @classmethod
    def create(cls, path: Path, config: TrainConfig, keep_checkpoints: int = KEEP) -> Self:
        """A new run; a folder that holds one already is left alone."""
        cls.check_free(path)
        checkpoints_of(path, keep_checkpoints)
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as taken:
            taken.enter_context(folder_lock(path))
            cls.check_free(path)  # now that nobody else can take it
            write_config(path, config, keep_checkpoints)
            return cls(path, config, keep_checkpoints, taken)

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise if there is something at this place, other than what a process left that was killed as it began."""
        with storage_errors(path):
            if path.exists() and (not path.is_dir() or any(not is_leftover(found) for found in path.iterdir())):
                raise BadValueError(f"{path} is in use; choose another --out, or go on with --resume {path}")

    @classmethod
    def open(cls, path: Path, config: TrainConfig, agent: PPOAgent) -> tuple[Self, Restored]:
        """A run to go on with, as it was after its last complete round that is whole on disk. Before the first one it
        begins with the given agent; later ones must be like it. `config`: see `check_settings`.

        The logs are cut to where they were then, their tails kept aside. What is not as it was is told of.
        """
        keep_checkpoints = read_header(path).keep_checkpoints
        remarks: list[str] = []

        def tell(remark: str) -> None:
            remarks.append(remark)
            warnings.warn(remark, RuntimeWarning, stacklevel=4)

        with ExitStack() as taken:
            taken.enter_context(folder_lock(path))  # before anything is tidied up: it may be another's at work
            with storage_errors(path):
                remove_leftovers(path)
            checkpoints = checkpoints_of(path, keep_checkpoints)
            found = checkpoints.read_newest(lambda number, place: _read_checkpoint(path, number, place, agent), tell)
            if found is None:
                _check_beginning(path)
                restored, offsets = Restored(agent, 0, TelemetryState()), (0, 0)
                tell(f"{path} has no checkpoint yet: it begins again with its first round")
            else:
                restored, progress = found
                _check_data(path, config, progress)
                offsets = (progress.events.size, progress.metrics.size)
                if changed := progress.machine.differences():
                    tell(f"the run goes on, but not bit for bit: {changed}")
            folder = cls(path, config, keep_checkpoints, taken, offsets)
        return folder, restored._replace(remarks=tuple(remarks))

    @staticmethod
    def last_checkpoint(path: Path) -> Path | None:
        """The newest checkpoint of a run; None before the first round is complete."""
        return checkpoints_of(path).newest()

    def keep(self, agent: PPOAgent, rounds: int, watching: TelemetryState) -> None:
        """A checkpoint after so many rounds; the logs up to here belong to it. Ctrl-C waits until it is written."""
        with interrupts_held():
            logs = LogState.of(self.events), LogState.of(self.metrics)
            progress = Progress(rounds, *logs, Machine.here(), _data_of(self.config))
            save_agent(agent, self.checkpoints.path_of(rounds), {"progress": progress, "watching": watching})
            self.checkpoints.prune()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._opened.close()
        except StorageError:
            if error is None:  # else it is the first error that tells what happened
                raise


def checkpoints_of(path: Path, keep: int = KEEP) -> Series:
    """The checkpoints of a run."""
    return Series(path / CHECKPOINTS, "round", keep)


def _read_checkpoint(path: Path, number: int, place: Path, like: PPOAgent) -> tuple[Restored, Progress]:
    """What a checkpoint holds, if it is whole, of this run, and the logs go as far as it says."""
    try:
        agent, extras = load_agent(place, EXTRAS, device=str(like.device))
    except CheckpointError as error:
        if _is_of_another_version(place):
            raise CheckpointError(
                "another version of Esper wrote it, which noted other things; the run can be evaluated, and another "
                "can begin with it (--start), but it cannot go on"
            ) from error
        raise
    progress: Progress = extras["progress"]
    if agent.table != like.table or agent.layout != like.layout:
        raise CheckpointError(f"{place}: a policy with other heads or columns than this version of Esper builds")
    if progress.rounds != number:
        raise CheckpointError(f"{place} holds the checkpoint of round {progress.rounds}: it was copied or renamed")
    for name, state in ((EVENTS, progress.events), (METRICS, progress.metrics)):
        _check_log(path / name, state, place)
    return Restored(agent, number, extras["watching"]), progress


def _is_of_another_version(place: Path) -> bool:
    """Whether a checkpoint is whole and only tells other things of its run than one of now."""
    try:
        progress = read_stored(place, AGENT)[0].get("progress")
    except CheckpointError:
        return False
    return isinstance(progress, dict) and set(progress) != {each.name for each in fields(Progress)}


def _data_of(config: TrainConfig) -> tuple[str, ...]:
    """What the run is trained on. Sets are loaded and read through once per process."""
    return tuple(data_digest(get_task(name).load_data(config.data_dir)) for name in config.tasks)


def _check_data(path: Path, config: TrainConfig, progress: Progress) -> None:
    """A set of the same name may be another copy."""
    for task, then, now in zip(config.tasks, progress.data, _data_of(config), strict=True):
        if then != now:
            raise CheckpointError(
                f"{path} was trained on other data: those of {task!r} that are found now have digest {now}, it had "
                f"{then}; say where its own lie (--data-dir, ESPER_DATA)"
            )


def _check_log(log: Path, state: LogState, place: Path) -> None:
    """A log has the lines that were written before a checkpoint, each as it was."""
    size = log.stat().st_size if log.is_file() else 0
    if size < state.size:
        raise CheckpointError(f"{log} has {size} bytes, {place.name} was written after {state.size}: lines are lost")
    if state.size and digest_of(log, state.size).hexdigest() != state.sha256:
        raise CheckpointError(
            f"{log} was changed: its first {state.size} bytes are not those that were there when {place.name} was "
            "written; put back what was, or let another run begin with this one's controller (--start)"
        )


def _check_beginning(path: Path) -> None:
    """A run that was killed in its first round has no checkpoint, and begins again; one with more has lost them."""
    for name in (METRICS, EVENTS, SESSIONS):
        lines = read_lines(path / name) if (path / name).is_file() else iter(())
        last = max((line.get("round", 0) for line in lines), default=0)
        if last > 0:  # of events and metrics the round that they are about, of sessions the next one to train
            rounds = last if name == SESSIONS else last + 1
            raise CheckpointError(
                f"{path / name} tells of {rounds} rounds, but {path / CHECKPOINTS} holds no checkpoint; "
                "put a copy of one in its place, or begin anew in another folder"
            )
