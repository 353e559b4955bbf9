"""Runs joined into one policy: one configuration, a training seed each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from esper.leyline import BadValueError
from esper.simic.training.config import TrainConfig
from esper.simic.training.run_config import read_config
from esper.simic.training.runs import checkpoints_of

FREE = ("seed", "start", "device", "threads", "data_dir", "alarms")
"""Settings in which runs of one configuration may differ; all others are what was trained."""


def check_joined(runs: Sequence[str]) -> None:
    """Raise unless these are different runs of one configuration: claims count training seeds."""
    folders: dict[Path, str] = {}
    chances: dict[tuple[int, Path | None], str] = {}
    first = read_config(Path(runs[0]))
    for run in runs:
        folder = Path(run).resolve()
        if folder in folders:
            raise BadValueError(f"{folders[folder]} and {run} are one folder, and so one training seed; name it once")
        folders[folder] = run
        config = read_config(folder)
        _check_recipe(runs[0], first, run, config)
        # Everything random follows from the seed: beside it, only what a run began with makes it another.
        chance = config.seed, None if config.start is None else config.start.resolve()
        if chance in chances:
            raise BadValueError(
                f"{chances[chance]} and {run} have the same configuration and training seed {config.seed}: that is one "
                "run, and a copy of it; name one of them"
            )
        chances[chance] = run


def _check_recipe(one: str, ours: TrainConfig, other: str, its: TrainConfig) -> None:
    here, there = dict(_recipe(ours)), dict(_recipe(its))
    for name in here | there:
        if here.get(name) != there.get(name):
            raise BadValueError(
                f"{one} and {other} are no training seeds of one configuration: {name} is {here.get(name)!r} in the "
                f"first and {there.get(name)!r} in the second; put a comma between them instead of +"
            )


def _recipe(config: TrainConfig) -> Iterator[tuple[str, object]]:
    """All settings but the free ones, by name; those of a part as `part.name`."""
    yield from _flat({name: value for name, value in asdict(config).items() if name not in FREE})


def _flat(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def unfinished(runs: Sequence[Path]) -> list[str]:
    """A warning for each run that has not trained for as long as it was configured to."""
    behind = {run: (max(checkpoints_of(run).numbers(), default=0), read_config(run).rounds) for run in runs}
    return [
        f"{run} has {done} of its {rounds} rounds behind it: its figures are those of a run that is not finished"
        for run, (done, rounds) in behind.items()
        if done < rounds
    ]
