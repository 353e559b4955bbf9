"""The smallest run that there is, and ways to go on with it, to look at it and to spoil it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from esper.simic.training.config import TrainConfig
from esper.simic.training.run_folder import checkpoints_of, read_config
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines
from esper.tolaria import TaskRegistry, get_task

NAME, ROUNDS = "digits_smallest", 4


def config(**changes: Any) -> TrainConfig:  # Any: fields by name
    """A run of a few of the smallest rounds."""
    if NAME not in TaskRegistry.names():
        small = replace(get_task("digits_blind"), name=NAME, steps=5, batches_per_step=1, batch=16, calibration_size=32)
        TaskRegistry.register(small)
    return TrainConfig(**{"task": NAME, "rounds": ROUNDS, "hosts": 2, "members": 1, **changes})


def resume(run: Path) -> Trainer:
    """Go on with a run."""
    return Trainer(read_config(run), run, resume=True)


def close(trainer: Trainer) -> None:
    """Let go of the run's files."""
    with trainer.folder:
        pass


def checkpoint(run: Path, rounds: int) -> Path:
    """Where it is."""
    return run / "checkpoints" / f"round-{rounds:05d}"


def contents(run: Path) -> dict[str, bytes]:
    """All files of a run."""
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def results(run: Path) -> tuple[list[dict[str, Any]], bytes, bytes]:
    """Metrics without what depends on the clock, events, and the tensors of the last checkpoint."""
    metrics = [{k: v for k, v in line.items() if k != "timing"} for line in read_lines(run / "metrics.jsonl")]
    last = checkpoints_of(run).newest()
    assert last is not None
    return metrics, (run / "events.jsonl").read_bytes(), (last / "agent.safetensors").read_bytes()


def spoil(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    path.write_bytes(change(path.read_bytes()))
