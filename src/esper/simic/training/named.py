"""Policies by name, as the command line gives them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from esper.leyline import BadValueError, UnknownNameError
from esper.simic.training.learned import load_policy
from esper.simic.training.run_config import read_config
from esper.simic.training.runs import RunFolder
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
