"""The folder of a run: its settings, its logs, its checkpoints."""

import json
import os
import subprocess
import warnings
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch

from esper.leyline import BadValueError, CheckpointError, EsperError, StorageError
from esper.leyline.records import config_checksum, decode, encode
from esper.nissa import LiveFile
from esper.simic.agent import PPOAgent, load_agent, save_agent
from esper.simic.telemetry import Detail, DetectorState
from esper.simic.training.config import TrainConfig, decode_config
from esper.storage.files import folder_lock, is_leftover, remove_leftovers, replace_file, storage_errors
from esper.storage.interrupts import interrupts_held
from esper.storage.logs import JsonLines, digest_of, read_lines
from esper.storage.series import KEEP, Series
from esper.storage.stored import Machine
from esper.tolaria import get_task
from esper.tolaria.data import data_digest

CONFIG, EVENTS, METRICS, CHECKPOINTS = "config.json", "events.jsonl", "metrics.jsonl", "checkpoints"
SESSIONS = "sessions.jsonl"  # append-only and never cut: how often a run was stopped is not part of what it computes


def write_config(path: Path, config: TrainConfig, keep_checkpoints: int, launchers: Collection[str] = ()) -> None:
    """Write the settings of a run, whole or not at all. `launchers`: those that started its ranks."""
    # Relative to the run's folder, so that both can be moved together.
    start = None if config.start is None else os.path.relpath(config.start.resolve(), path.resolve())
    data_dir = None if config.data_dir is None else str(config.data_dir.resolve())
    content = {
        "config": encode({**asdict(config), "start": start, "data_dir": data_dir}),
        "keep_checkpoints": keep_checkpoints,
        "launchers": sorted(launchers),
        "git": git_hash(),
        "torch": torch.__version__,
    }
    content["checksum"] = config_checksum(content)
    replace_file(path / CONFIG, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_config(path: Path) -> TrainConfig:
    """The settings of a run, proven to be those that were written."""
    return _read_header(path).config


def ranks_of(path: Path) -> int | None:
    """The number of ranks of a run's last session; None before the first."""
    log = path / SESSIONS
    sessions = (line["machine"] for line in (read_lines(log) if log.is_file() else ()) if "machine" in line)
    ranks = [int(machine.get("ranks", 1)) for machine in sessions]
    return ranks[-1] if ranks else None


class _Header(NamedTuple):
    config: TrainConfig
    keep_checkpoints: int
    checksum: str
    launchers: frozenset[str]


def _read_header(path: Path) -> _Header:
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        config = decode_config(content["config"], "config")
        keep_checkpoints = decode(int, content["keep_checkpoints"], "keep_checkpoints")
        launchers = frozenset(content.get("launchers", ()))  # older runs have none
        stated, actual = content["checksum"], config_checksum(content)
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadValueError(f"{path} is no run folder: {CONFIG} is missing or damaged ({error})") from error
    if stated != actual:
        raise CheckpointError(
            f"{path / CONFIG} was changed: it states checksum {stated!r}, its content has {actual}; "
            "restore what was written, or start a new run in another folder"
        )
    start = None if config.start is None else Path(os.path.normpath(path.resolve() / config.start))
    return _Header(replace(config, start=start), keep_checkpoints, actual, launchers)


def read_checksum(path: Path) -> str:
    """The checksum of a run's settings, which tells it from runs of other settings."""
    return _read_header(path).checksum


def is_own(path: Path, launchers: Collection[str]) -> bool:
    """Whether a run's folder was made by ranks that one of these launchers started."""
    try:
        return not _read_header(path).launchers.isdisjoint(launchers)
    except EsperError:  # no folder of a run, or a damaged one
        return False


def check_settings(path: Path, config: TrainConfig) -> None:
    """Raise unless a run was begun with these settings; the data folder may differ."""
    given, own = (
        vars(replace(each, data_dir=None, start=each.start and each.start.resolve()))
        for each in (config, read_config(path))
    )
    differences = [f"{name} {given[name]!r}, begun with {own[name]!r}" for name in own if given[name] != own[name]]
    if differences:
        raise BadValueError(
            f"{path} cannot continue with other settings ({'; '.join(differences)}); use its own, or another folder"
        )


def git_hash() -> str | None:
    """The commit of the code, if it is in a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class LogState:
    """Size and digest of a log when a checkpoint was written."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Progress:
    """The state of a run when a checkpoint was written."""

    rounds: int
    events: LogState
    metrics: LogState
    machine: Machine
    data: tuple[str, ...]  # digests of the data sets, task by task


@dataclass(frozen=True)
class TelemetryState:
    """The state of the anomaly detector and the level of detail."""

    detector: DetectorState = field(default_factory=DetectorState)
    detail: Detail = field(default_factory=Detail)


EXTRAS: dict[str, type] = {"progress": Progress, "watching": TelemetryState}  # in a checkpoint, beside the agent


class Restored(NamedTuple):
    """The state that a run continues with."""

    agent: PPOAgent
    rounds: int = 0  # complete ones
    telemetry: TelemetryState = TelemetryState()
    remarks: tuple[str, ...] | None = None  # what differs from before; None for a new run


class RunFolder:
    """One run on disk, locked for this process. Leaving it as a context manager closes its files and the lock."""

    def __init__(
        self, path: Path, config: TrainConfig, checkpoints: Series, lock: ExitStack, offsets: tuple[int, int] = (0, 0)
    ) -> None:
        """`lock` is the folder's; if this fails it stays with the caller. The logs are cut at the offsets."""
        self.path, self.config, self.checkpoints = path, config, checkpoints
        self.events = lock.enter_context(JsonLines(path / EVENTS, offsets[0]))
        self.metrics = lock.enter_context(JsonLines(path / METRICS, offsets[1]))
        self.live = lock.enter_context(LiveFile(path))  # for those who watch; no part of the run
        self._resources = lock.pop_all()

    @classmethod
    def create(
        cls, path: Path, config: TrainConfig, keep_checkpoints: int = KEEP, launchers: Collection[str] = ()
    ) -> Self:
        """A new run, for ranks that these launchers started. A folder that already contains one is refused."""
        checkpoints = checkpoints_of(path, keep_checkpoints)  # refuses a bad number before anything is written
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock:
            lock.enter_context(folder_lock(path))
            cls.check_free(path)
            write_config(path, config, keep_checkpoints, launchers)
            return cls(path, config, checkpoints, lock)

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise if the folder exists and holds more than what a killed process left as it began."""
        with storage_errors(path):
            if path.exists() and (not path.is_dir() or not all(map(is_leftover, path.iterdir()))):
                raise BadValueError(f"{path} is in use; choose another --out, or continue with --resume {path}")
        for parent in path.resolve().parents:
            if (parent / CONFIG).is_file() and (parent / CHECKPOINTS).is_dir():
                raise BadValueError(f"{path} lies inside the run {parent}; choose an --out outside it")

    @classmethod
    def open(cls, path: Path, config: TrainConfig, agent: PPOAgent) -> tuple[Self, Restored]:
        """A run to continue after its last complete round whose checkpoint and logs are intact, else with `agent`.

        The logs are cut to that round and their tails moved aside. Differences are warned of."""
        checkpoints = checkpoints_of(path, _read_header(path).keep_checkpoints)
        remarks: list[str] = []

        def remark(text: str) -> None:
            remarks.append(text)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

        with ExitStack() as lock:
            lock.enter_context(folder_lock(path))  # before cleaning up: another process may be at work
            remove_leftovers(path)
            checkpoint = checkpoints.read_newest(
                lambda number, folder: _read_checkpoint(path, number, folder, agent), remark
            )
            if checkpoint is None:
                _check_beginning(path)
                restored, offsets = Restored(agent), (0, 0)
                remark(f"{path} has no checkpoint yet: it begins again with its first round")
            else:
                restored, progress = checkpoint
                _check_data(path, config, progress)
                offsets = (progress.events.size, progress.metrics.size)
                if changed := progress.machine.differences():
                    remark(f"the run continues, but not bit for bit: {changed}")
            run = cls(path, config, checkpoints, lock, offsets)
        return run, restored._replace(remarks=tuple(remarks))

    def save(self, agent: PPOAgent, rounds: int, telemetry: TelemetryState) -> None:
        """Write the checkpoint after `rounds` rounds, with the state of the logs. Ctrl-C waits for it."""
        with interrupts_held():
            events, metrics = (LogState(log.flush(), log.sha256) for log in (self.events, self.metrics))
            progress = Progress(rounds, events, metrics, Machine.here(), data_of(self.config))
            save_agent(agent, self.checkpoints.path_of(rounds), {"progress": progress, "watching": telemetry})
            self.checkpoints.prune()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._resources.close()
        except StorageError:
            if kind is None:  # otherwise the first error says what happened
                raise


def checkpoints_of(path: Path, keep: int = KEEP) -> Series:
    """The checkpoints of a run."""
    return Series(path / CHECKPOINTS, "round", keep)


def _read_checkpoint(path: Path, number: int, folder: Path, like: PPOAgent) -> tuple[Restored, Progress]:
    """The content of a checkpoint. Raises unless it is intact, of this run, and the logs have all its lines."""
    agent, extras = load_agent(folder, EXTRAS, device=str(like.device))
    progress: Progress = extras["progress"]
    if agent.table != like.table or agent.layout != like.layout:
        raise CheckpointError(f"{folder}: a policy with other heads or columns than this version of Esper builds")
    if progress.rounds != number:
        raise CheckpointError(f"{folder} holds the checkpoint of round {progress.rounds}: it was copied or renamed")
    for log, state in ((path / EVENTS, progress.events), (path / METRICS, progress.metrics)):
        size = log.stat().st_size if log.is_file() else 0
        if size < state.size:
            raise CheckpointError(
                f"{log} has {size} bytes, {folder.name} was written after {state.size}: lines are lost"
            )
        if state.size and digest_of(log, state.size).hexdigest() != state.sha256:
            raise CheckpointError(
                f"{log} was changed: its first {state.size} bytes are not those from before {folder.name}; restore "
                "them, or start another run with this one's controller (--start)"
            )
    return Restored(agent, number, extras["watching"]), progress


def data_of(config: TrainConfig) -> tuple[str, ...]:
    """Digests of the data sets of a run. Each is loaded and read once per process."""
    return tuple(data_digest(get_task(name).load_data(config.data_dir)) for name in config.tasks)


def _check_data(path: Path, config: TrainConfig, progress: Progress) -> None:
    for task, then, now in zip(config.tasks, progress.data, data_of(config), strict=True):
        if then != now:
            raise CheckpointError(
                f"{path} was trained on other data: those of {task!r} now have digest {now}, it had {then}; "
                "point --data-dir or ESPER_DATA to the original data"
            )


def _check_beginning(path: Path) -> None:
    """Raise if the logs of a run without checkpoints tell of complete rounds: then it has lost its checkpoints."""
    for name in (METRICS, EVENTS, SESSIONS):
        lines = read_lines(path / name) if (path / name).is_file() else ()
        last = max((line.get("round", 0) for line in lines), default=0)
        if last > 0:  # events and metrics name the round itself, sessions the next one
            raise CheckpointError(
                f"{path / name} tells of {last + (name != SESSIONS)} rounds, but {path / CHECKPOINTS} holds no "
                "checkpoint; put a copy of one there, or start a new run in another folder"
            )
