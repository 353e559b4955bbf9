"""Policies by name, as the command line gives them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from esper.leyline import BadValueError, UnknownNameError
from esper.simic.agent.policy import load_policy
from esper.simic.training.config import TrainConfig
from esper.simic.training.run_folder import RunFolder, checkpoints_of, read_config
from esper.tamiyo import ActionTable, Policy, growth_layout
from esper.tamiyo.policies import (
    HeuristicTamiyo,
    RandomCommitPolicy,
    RandomPolicy,
    SchedulePolicy,
    WaitPolicy,
)
from esper.tamiyo.policies.shipped import TunedKind, read_heuristic, read_plan, shipped_file
from esper.tolaria import Task

RULES = ("wait", "random", "random-commit", "heuristic", "schedule", "oracle")
"""Names of what was not learned."""
SHIPPED = "shipped"
"""`heuristic:shipped`, `schedule:shipped`: the task's file that comes with Esper."""


def make_policies(spec: str, task: Task, table: ActionTable, device: str = "cpu") -> list[Policy]:
    """The policies behind one name: one, or one per run folder.

    A bare `schedule` is the shipped one of the task, a bare `heuristic` the untuned one.
    """
    name, _, file = spec.partition(":")
    slots = task.slot_config
    if name == "wait":
        return [WaitPolicy(table)]
    if name == "random":
        return [RandomPolicy(table)]
    if name == "random-commit":
        return [RandomCommitPolicy(table, task.steps)]
    if name == "heuristic":
        config = read_heuristic(_tuned_file("heuristic", file, task)) if file else None
        return [HeuristicTamiyo(table, slots, config)]
    if name == "schedule":
        return [SchedulePolicy(table, slots, read_plan(_tuned_file("schedule", file or SHIPPED, task)))]
    if name == "oracle":
        raise BadValueError("the oracle looks at results and acts on none: it is no policy; `esper evaluate` runs it")
    parts = spec.split("+")
    if not all(part.strip() for part in parts):
        # As a path it would be the folder that one is in.
        raise BadValueError(f"policy {spec!r} has an empty name; allowed: {', '.join(RULES)}, or a run folder")
    return [_from_run(Path(part), task, table, device) for part in parts]


def short_name(spec: str) -> str:
    """Run folders by their names alone, runs of several training seeds by what their names have in common."""
    kind, colon, rest = spec.rpartition(":")
    if "/" not in rest and "+" not in rest:
        return spec
    names = [Path(part).name for part in rest.split("+")]
    if len(names) == 1:
        return f"{kind}{colon}{names[0]}"
    return f"{kind}{colon}{names[0].rstrip('0123456789') or names[0]} ({len(names)} seeds)"


def short_names(specs: Iterable[str]) -> dict[str, str]:
    """By spec: its short name or, where another one has the same, all of it."""
    short = {spec: short_name(spec) for spec in specs}
    times = Counter(short.values())
    return {spec: name if times[name] == 1 else spec for spec, name in short.items()}


def _from_run(path: Path, task: Task, table: ActionTable, device: str) -> Policy:
    if not path.is_dir():
        raise UnknownNameError("policy", str(path), (*RULES, "a run folder"))
    config = read_config(path)
    last = RunFolder.last_checkpoint(path)
    if last is None:
        raise BadValueError(f"{path} has no checkpoint yet: its first round is not complete")
    layout = growth_layout(task.slot_config, sensing=config.sensing)
    return load_policy(last, table, layout, device=device)


def policy_files(spec: str, task: Task) -> list[Path]:
    """The files that make one policy what it is, beside the code: a plan, thresholds or the last checkpoint."""
    name, _, file = spec.partition(":")
    if name == "schedule":
        return [_tuned_file("schedule", file or SHIPPED, task)]
    if name == "heuristic" and file:
        return [_tuned_file("heuristic", file, task)]
    if name in RULES:
        return []
    last = RunFolder.last_checkpoint(Path(spec))
    return [] if last is None else sorted(last.iterdir())


def _tuned_file(kind: TunedKind, file: str, task: Task) -> Path:
    return shipped_file(kind, task.name) if file == SHIPPED else Path(file)


FREE = ("seed", "start", "device", "threads", "data_dir", "alarms")
"""Settings in which runs of one configuration may differ; all others are what was trained."""


def check_same_recipe(runs: Sequence[str]) -> None:
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
