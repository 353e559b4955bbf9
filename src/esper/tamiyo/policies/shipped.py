"""Files of tuned policies: those that `esper tune` writes, and those shipped with Esper, one per kind and task.

{"format": 1, "kind": "schedule", "task": …, "plan": {…}, "search": {…}}
{"format": 1, "kind": "heuristic", "task": …, "heuristic": {…}, "search": {…}}

A bare plan or configuration, written by hand, is accepted too.
"""

import json
from pathlib import Path
from typing import Literal, get_args

from esper.leyline import BadValueError
from esper.leyline.records import Json, decode
from esper.tamiyo.policies.heuristic import HeuristicConfig
from esper.tamiyo.policies.open_loop import Plan

FORMAT = 1
TunedKind = Literal["schedule", "heuristic"]
TUNED_KINDS: tuple[TunedKind, ...] = get_args(TunedKind)
CONTENT: dict[TunedKind, str] = {"schedule": "plan", "heuristic": "heuristic"}
"""The key of a file's content."""
SHIPPED = Path(__file__).with_suffix("")


def shipped_file(kind: TunedKind, task_name: str) -> Path:
    """The shipped file of a task; raises if there is none."""
    path = SHIPPED / f"{kind}-{task_name}.json"
    if not path.is_file():
        raise BadValueError(
            f"no tuned {kind} for task {task_name!r} is shipped; "
            f"make one with `esper tune --task {task_name} --kind {kind} --out FILE` and pass it as {kind}:FILE"
        )
    return path


def read_plan(path: Path) -> Plan:
    """The plan of a tuned file, or a bare plan."""
    plan: Plan = decode(Plan, _content(path, "schedule"), str(path))
    return plan


def read_heuristic(path: Path) -> HeuristicConfig:
    """The configuration of a tuned file, or a bare configuration."""
    config: HeuristicConfig = decode(HeuristicConfig, _content(path, "heuristic"), str(path))
    return config


def _content(path: Path, kind: TunedKind) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: neither JSON nor text
        raise BadValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        return content
    if content["format"] != FORMAT:
        raise BadValueError(f"{path} has format {content['format']!r}; this version of Esper reads format {FORMAT}")
    if (other := content.get("kind")) != kind:
        raise BadValueError(f"{path} holds a tuned {other}, not a {kind}; pass it as {other}:{path}")
    if CONTENT[kind] not in content:
        raise BadValueError(f"{path} has kind {kind} but lacks {CONTENT[kind]!r}")
    return content[CONTENT[kind]]
