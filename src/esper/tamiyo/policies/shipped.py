"""Files of tuned policies: those that `esper tune` writes, and those shipped with Esper, one per kind and task.

{"format": 1, "kind": "schedule", "task": …, "plan": {…}, "search": {…}}
{"format": 1, "kind": "heuristic", "task": …, "heuristic": {…}, "search": {…}}
{"format": 1, "kind": "told", "task": …, "plans": {kind of host: {…}, …}, "search": {…}}

A bare plan, configuration or object of plans, written by hand, is accepted too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from esper.leyline import BadValueError
from esper.leyline.records import Json, decode
from esper.tamiyo.policies.heuristic import HeuristicConfig
from esper.tamiyo.policies.open_loop import Plan

FORMAT = 1
TunedKind = Literal["schedule", "heuristic", "told"]
TUNED_KINDS: tuple[TunedKind, ...] = get_args(TunedKind)
CONTENT: dict[TunedKind, str] = {"schedule": "plan", "heuristic": "heuristic", "told": "plans"}
"""The key of a file's content"""
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


def read_told(path: Path, kinds: Sequence[str]) -> dict[str, Plan]:
    """The plans by kind of host of a tuned file, or of a bare object; there must be one for each of these kinds."""
    content = _content(path, "told")
    if not isinstance(content, dict):
        raise BadValueError(f"{path} holds {content!r}; write an object of plans by kind of host: {', '.join(kinds)}")
    if missing := [kind for kind in kinds if kind not in content]:
        raise BadValueError(f"{path} has plans for {', '.join(content)} but none for hosts of kind {missing[0]!r}")
    return {kind: decode(Plan, content[kind], f"{path}: {kind}") for kind in kinds}


def search_of(path: Path) -> dict[str, Json]:
    """How a tuned file was searched (task, method, budget, seed); empty if it was written by hand."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(search := content.get("search"), dict):
        return {}
    return {"task": content.get("task")} | {name: search.get(name) for name in ("method", "budget", "rng_seed")}


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
