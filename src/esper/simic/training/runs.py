"""The folder of a run: its configuration, its log, its metrics, its checkpoints."""

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from esper.leyline import BadValueError, CheckpointError, StorageError
from esper.leyline.files import folder_taken, is_leftover, remove_leftovers, replace_file, storing
from esper.leyline.interrupts import interrupts_held
from esper.leyline.machine import Machine
from esper.leyline.records import Json, decode, encode
from esper.leyline.series import KEEP, Series
from esper.leyline.stored import checksum, refusal
from esper.nissa import JsonLines, read_lines
from esper.nissa.log import digest_of
from esper.simic.agent import PPOAgent, load_agent, save_agent
from esper.simic.telemetry import AlarmLimits, Detail, DetectorState
from esper.simic.training.config import TrainConfig

CONFIG, EVENTS, METRICS, CHECKPOINTS = "config.json", "events.jsonl", "metrics.jsonl", "checkpoints"
SESSIONS = "sessions.jsonl"
"""Append-only, never cut: how often a run was stopped and resumed is no part of what it computes."""
PATHS = ("data_dir", "start")
"""Settings that are paths; JSON holds them as text."""


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


@dataclass(frozen=True)
class Watching:
    """What the detector of anomalies remembers."""

    detector: DetectorState = field(default_factory=DetectorState)
    detail: Detail = field(default_factory=Detail)


EXTRAS: dict[str, type] = {"progress": Progress, "watching": Watching}
"""What lies beside the agent in a run's checkpoint."""


class Restored(NamedTuple):
    """What a run goes on with."""

    agent: PPOAgent
    rounds: int
    """How many it has behind it"""
    watching: Watching
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
        with storing(path):
            path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as taken:
            taken.enter_context(folder_taken(path))
            cls.check_free(path)  # now that nobody else can take it
            write_config(path, config, keep_checkpoints)
            return cls(path, config, keep_checkpoints, taken)

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise if there is something at this place, other than what a process left that was killed as it began."""
        with storing(path):
            if path.exists() and (not path.is_dir() or any(not is_leftover(found) for found in path.iterdir())):
                raise BadValueError(f"{path} is in use; choose another --out, or go on with --resume {path}")

    @classmethod
    def open(cls, path: Path, agent: PPOAgent) -> tuple[Self, Restored]:
        """A run to go on with, as it was after its last complete round that is whole on disk. Before the first one it
        begins with the given agent; later ones must be like it.

        The logs are cut to where they were then, their tails kept aside. What is not as it was is told of.
        """
        header = read_header(path)
        remarks: list[str] = []

        def tell(remark: str) -> None:
            remarks.append(remark)
            warnings.warn(remark, RuntimeWarning, stacklevel=4)

        with ExitStack() as taken:
            taken.enter_context(folder_taken(path))  # before anything is tidied up: it may be another's at work
            with storing(path):
                remove_leftovers(path)
            checkpoints = checkpoints_of(path, header.keep_checkpoints)
            found = checkpoints.read_newest(lambda number, place: _read_checkpoint(path, number, place, agent), tell)
            if found is None:
                _check_beginning(path)
                restored, offsets = Restored(agent, 0, Watching()), (0, 0)
                tell(f"{path} has no checkpoint yet: it begins again with its first round")
            else:
                restored, progress = found
                offsets = (progress.events.size, progress.metrics.size)
                if changed := progress.machine.differences():
                    tell(f"the run goes on, but not bit for bit: {changed}")
            folder = cls(path, header.config, header.keep_checkpoints, taken, offsets)
        return folder, restored._replace(remarks=tuple(remarks))

    @staticmethod
    def last_checkpoint(path: Path) -> Path | None:
        """The newest checkpoint of a run; None before the first round is complete."""
        return checkpoints_of(path).newest()

    def keep(self, agent: PPOAgent, rounds: int, watching: Watching) -> None:
        """A checkpoint after so many rounds; the logs up to here belong to it. Ctrl-C waits until it is written."""
        with interrupts_held():
            progress = Progress(rounds, LogState.of(self.events), LogState.of(self.metrics), Machine.here())
            save_agent(agent, self.checkpoints.place(rounds), {"progress": progress, "watching": watching})
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
    agent, extras = load_agent(place, EXTRAS, device=str(like.device))
    progress: Progress = extras["progress"]
    if agent.table != like.table or agent.layout != like.layout:
        raise CheckpointError(f"{place}: a policy with other heads or columns than this version of Esper builds")
    if progress.rounds != number:
        raise CheckpointError(f"{place} holds the checkpoint of round {progress.rounds}: it was copied or renamed")
    for name, state in ((EVENTS, progress.events), (METRICS, progress.metrics)):
        _check_log(path / name, state, place)
    return Restored(agent, number, extras["watching"]), progress


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


# -- the configuration ------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """What `config.json` tells."""

    config: TrainConfig
    keep_checkpoints: int


def write_config(path: Path, config: TrainConfig, keep_checkpoints: int) -> None:
    """Write the resolved configuration of a run, whole or not at all."""
    content = {
        "config": encode({**asdict(config), **{name: _text(getattr(config, name)) for name in PATHS}}),
        "keep_checkpoints": keep_checkpoints,
        "git": git_hash(),
        "torch": torch.__version__,
    }
    content["checksum"] = _config_checksum(content)
    replace_file(path / CONFIG, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _place(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _config_checksum(content: Mapping[str, Json]) -> str:
    """Over everything but where data sets lie, which may differ from machine to machine."""
    config = {name: value for name, value in content["config"].items() if name != "data_dir"}
    return checksum({**{name: value for name, value in content.items() if name != "checksum"}, "config": config})


def read_config(path: Path) -> TrainConfig:
    """The resolved configuration of a run."""
    return read_header(path).config


def read_header(path: Path) -> Header:
    """The configuration, proven to be what was written. Older folders state no checksum, no start and no limits of
    alarms, and keep all checkpoints."""
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        values = dict(content["config"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise BadValueError(f"{path} is no run folder: {CONFIG} is missing or damaged ({error})") from error
    with refusal(str(path / CONFIG)):
        if "checksum" in content and content["checksum"] != (found := _config_checksum(content)):
            raise CheckpointError(
                f"{path / CONFIG} was changed: it states checksum {content['checksum']!r}, its content has {found}; "
                "put back what was written, or begin anew in another folder"
            )
    values.setdefault("alarms", encode(AlarmLimits()))
    data_dir, start = (_place(values.pop(name, None)) for name in PATHS)
    config: TrainConfig = decode(TrainConfig, {**values, **dict.fromkeys(PATHS)}, "config")
    keep = decode(int, content.get("keep_checkpoints", sys.maxsize), "keep_checkpoints")
    return Header(replace(config, data_dir=data_dir, start=start), keep)


def git_hash() -> str | None:
    """The commit that the code is at, where it lies in a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
