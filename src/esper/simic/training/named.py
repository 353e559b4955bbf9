"""Policies by name, as the command line gives them."""

import json
from pathlib import Path

from esper.leyline import BadValueError, UnknownNameError
from esper.leyline.records import Json, decode
from esper.simic.training.learned import load_policy
from esper.simic.training.runs import RunFolder, read_config
from esper.tamiyo import ActionTable, Policy, growth_layout
from esper.tamiyo.policies import (
    HeuristicConfig,
    HeuristicTamiyo,
    Plan,
    RandomCommitPolicy,
    RandomPolicy,
    SchedulePolicy,
    WaitPolicy,
)
from esper.tolaria import Task

RULES = ("wait", "random", "random-commit", "heuristic", "schedule")


def make_policies(spec: str, task: Task, table: ActionTable, device: str = "cpu") -> list[Policy]:
    """The policies behind one name: one, or one per run folder."""
    name, _, file = spec.partition(":")
    slots = task.slot_config
    if name == "wait":
        return [WaitPolicy(table)]
    if name == "random":
        return [RandomPolicy(table)]
    if name == "random-commit":
        return [RandomCommitPolicy(table, task.steps)]
    if name == "heuristic":
        config = decode(HeuristicConfig, _read(file), file) if file else HeuristicConfig()
        return [HeuristicTamiyo(table, slots, config)]
    if name == "schedule":
        if not file:
            raise BadValueError(f"no plan for task {task.name!r} is shipped; give one: schedule:FILE")
        plan: Plan = decode(Plan, _read(file), file)
        return [SchedulePolicy(table, slots, plan)]
    return [_from_run(Path(part), task, table, device) for part in spec.split("+")]


def _from_run(path: Path, task: Task, table: ActionTable, device: str) -> Policy:
    if not path.is_dir():
        raise UnknownNameError("policy", str(path), (*RULES, "a run folder"))
    config = read_config(path)
    last = RunFolder.last_checkpoint(path)
    if last is None:
        raise BadValueError(f"{path} has no checkpoint yet: its first round is not complete")
    layout = growth_layout(task.slot_config, sensing=config.sensing)
    return load_policy(last, table, layout, device=device)


def _read(file: str) -> Json:
    try:
        return json.loads(Path(file).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise BadValueError(f"{file} cannot be read as JSON: {error}") from error
