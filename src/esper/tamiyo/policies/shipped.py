"""Files of tuned policies: what `esper tune` writes, and those that come with Esper, one per kind and task.

{"format": 1, "kind": "schedule", "task": …, "plan": {…}, "search": {…}}
{"format": 1, "kind": "heuristic", "task": …, "heuristic": {…}, "search": {…}}

A plan or a configuration alone, written by hand, is read as well.
"""

import json
from pathlib import Path
from typing import Literal, get_args

from esper.leyline import BadValueError
from esper.leyline.records import Json, decode
from esper.tamiyo.policies.heuristic import HeuristicConfig
from esper.tamiyo.policies.schedule import Plan

FORMAT = 1
TunedKind = Literal["schedule", "heuristic"]
TUNED_KINDS: tuple[TunedKind, ...] = get_args(TunedKind)
CONTENT: dict[TunedKind, str] = {"schedule": "plan", "heuristic": "heuristic"}
"""The key under which a file holds what was found."""
SHIPPED = Path(__file__).with_suffix("")


def shipped_file(kind: TunedKind, task_name: str) -> Path:
    """The file that comes with Esper; raises where there is none."""
    path = SHIPPED / f"{kind}-{task_name}.json"
    if not path.is_file():
        raise BadValueError(
            f"no tuned {kind} for task {task_name!r} is shipped; "
            f"make one with `esper tune --task {task_name} --kind {kind} --out FILE` and give it: {kind}:FILE"
        )
    return path


def read_plan(path: Path) -> Plan:
    """The plan of a tuned file, or a plan alone."""
    plan: Plan = decode(Plan, _content(path, "schedule"), str(path))
    return plan


def read_heuristic(path: Path) -> HeuristicConfig:
    """The configuration of a tuned file, or a configuration alone."""
    config: HeuristicConfig = decode(HeuristicConfig, _content(path, "heuristic"), str(path))
    return config


def _content(path: Path, kind: TunedKind) -> Json:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no JSON, or no text at all
        raise BadValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or "format" not in found:
        return found
    if found["format"] != FORMAT:
        raise BadValueError(f"{path} is of format {found['format']!r}; this version of Esper reads format {FORMAT}")
    if found.get("kind") != kind:
        other = found.get("kind")
        raise BadValueError(f"{path} holds a tuned {other}, not a {kind}; give it as {other}:{path}")
    if CONTENT[kind] not in found:
        raise BadValueError(f"{path} says that it holds a {kind} but lacks {CONTENT[kind]!r}")
    return found[CONTENT[kind]]
