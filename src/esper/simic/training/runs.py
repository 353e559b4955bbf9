"""The folder of a run: its configuration, its log, its metrics, its checkpoints."""

import json
import subprocess
import warnings
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from esper.leyline import BadValueError, CheckpointError
from esper.leyline.records import decode, encode
from esper.nissa import JsonLines
from esper.simic.agent import PPOAgent, load_agent, save_agent
from esper.simic.telemetry import Detail, DetectorState
from esper.simic.training.config import TrainConfig

CONFIG, EVENTS, METRICS, CHECKPOINTS = "config.json", "events.jsonl", "metrics.jsonl", "checkpoints"


@dataclass(frozen=True)
class Machine:
    """What numbers may depend on beside the seed."""

    torch: str
    threads: int
    cpu: str
    """The instructions that kernels may use"""

    @classmethod
    def here(cls) -> "Machine":
        """Of this process."""
        return cls(torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())


@dataclass(frozen=True)
class Progress:
    """Where a run was when a checkpoint was written."""

    rounds: int
    events_offset: int
    metrics_offset: int
    machine: Machine


@dataclass(frozen=True)
class Watching:
    """What the detector of anomalies remembers."""

    detector: DetectorState = field(default_factory=DetectorState)
    detail: Detail = field(default_factory=Detail)


EXTRAS: dict[str, type] = {"progress": Progress, "watching": Watching}
"""What lies beside the agent in a run's checkpoint."""


class RunFolder:
    """One run on disk. Use it as a context manager: it closes its files."""

    def __init__(self, path: Path, config: TrainConfig, offsets: tuple[int, int] | None = None) -> None:
        self.path, self.config = path, config
        events, metrics = offsets if offsets is not None else (None, None)
        self.events = JsonLines(path / EVENTS, events)
        self.metrics = JsonLines(path / METRICS, metrics)

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> Self:
        """A new run; a folder that holds one already is left alone."""
        cls.check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            content = {"config": encode(config), "git": git_hash(), "torch": torch.__version__}
            (path / CONFIG).write_text(json.dumps(content, indent=1, allow_nan=False, default=str) + "\n")
        except OSError as error:
            raise BadValueError(f"{path} cannot be written: {error}") from error
        return cls(path, config)

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise if there is something at this place."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadValueError(f"{path} is in use; choose another --out, or go on with --resume {path}")

    @classmethod
    def open(cls, path: Path) -> Self:
        """A run to go on with, as it was after its last complete round."""
        config = read_config(path)
        last = cls.last_checkpoint(path)
        if last is None:
            return cls(path, config, (0, 0))
        progress = _progress(last)
        return cls(path, config, (progress.events_offset, progress.metrics_offset))

    @staticmethod
    def last_checkpoint(path: Path) -> Path | None:
        """The newest checkpoint of a run; None before the first round is complete."""
        found = sorted((path / CHECKPOINTS).glob("round-*")) if (path / CHECKPOINTS).is_dir() else []
        return found[-1] if found else None

    def keep(self, agent: PPOAgent, rounds: int, watching: Watching) -> None:
        """A checkpoint after so many rounds; the logs up to here belong to it."""
        progress = Progress(rounds, self.events.flush(), self.metrics.flush(), Machine.here())
        save_agent(agent, self.path / CHECKPOINTS / f"round-{rounds:05d}", {"progress": progress, "watching": watching})

    def load(self, agent: PPOAgent) -> tuple[PPOAgent, int, Watching]:
        """The agent of the last checkpoint and how many rounds it has behind it; the given one if there is none."""
        last = self.last_checkpoint(self.path)
        if last is None:
            return agent, 0, Watching()
        loaded, extras = load_agent(last, EXTRAS, device=str(agent.device))
        if loaded.table != agent.table or loaded.layout != agent.layout:
            raise CheckpointError(f"{last}: a policy with other heads or columns than this version of Esper builds")
        _warn_of_differences(extras["progress"].machine)
        return loaded, int(extras["progress"].rounds), extras["watching"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.events.close()
        self.metrics.close()


def _warn_of_differences(then: Machine) -> None:
    """Say so where a run goes on under other conditions."""
    now = Machine.here()
    names = [each.name for each in fields(Machine) if getattr(then, each.name) != getattr(now, each.name)]
    if names:
        changed = ", ".join(f"{name} {getattr(then, name)} → {getattr(now, name)}" for name in names)
        warnings.warn(f"the run goes on, but not bit for bit: {changed}", RuntimeWarning, stacklevel=3)


def read_config(path: Path) -> TrainConfig:
    """The resolved configuration of a run."""
    try:
        content = json.loads((path / CONFIG).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise BadValueError(f"{path} is no run folder: {error}") from error
    values = dict(content["config"])
    data_dir = values.pop("data_dir", None)
    config: TrainConfig = decode(TrainConfig, {**values, "data_dir": None}, "config")
    return replace(config, data_dir=None if data_dir is None else Path(data_dir))


def _progress(checkpoint: Path) -> Progress:
    _, extras = load_agent(checkpoint, EXTRAS)
    progress: Progress = extras["progress"]
    return progress


def git_hash() -> str | None:
    """The commit that the code is at, where it lies in a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
