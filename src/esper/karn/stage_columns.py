"""The changes of stage of an episode, from the columns of its line (`esper.nissa.events`): by Python, and by SQL."""

from collections.abc import Mapping
from typing import TypeVar

from esper.karn.fields import Fields
from esper.karn.lines import StageEvent
from esper.leyline import CAUSES, BadValueError, SeedStage, UnknownNameError

T_ = TypeVar("T_")
_STAGES = {stage.letter: stage for stage in SeedStage}
_CAUSES = {letter: cause for cause, letter in CAUSES.items()}


def changes_of(line: Fields, env: int) -> list[StageEvent]:
    """The changes of stage in the line of an episode, in order."""
    columns = line.inside("stages")
    steps, slots, blueprints = columns.wholes("step"), columns.texts("slot"), columns.optional_texts("blueprint")
    sources, targets = (_spelled(columns, name, _STAGES) for name in ("source", "target"))
    causes = _spelled(columns, "cause", _CAUSES)
    if len({len(column) for column in (steps, slots, blueprints, sources, targets, causes)}) > 1:
        raise BadValueError(f"{columns.where}: its columns differ in length")
    seeds = zip(slots, blueprints, sources, targets, causes, strict=True)
    return [StageEvent(step, env, *seed) for step, seed in zip(steps, seeds, strict=True)]


def _spelled(columns: Fields, key: str, meanings: Mapping[str, T_]) -> list[T_]:
    """What the letters of a text stand for."""
    letters = columns.text(key)
    for letter in letters:
        if letter not in meanings:
            raise UnknownNameError(f"letter ({columns.where}, {key})", letter, meanings)
    return [meanings[letter] for letter in letters]


_PARSED = """from_json(stages, '{"step": ["BIGINT"], "slot": ["VARCHAR"], "blueprint": ["VARCHAR"], "source": "VARCHAR",
  "target": "VARCHAR", "cause": "VARCHAR"}')"""
_STAGE_NAMES = {letter: stage.name for letter, stage in _STAGES.items()}
CHANGES_SQL = f"""
SELECT round, task, env, place, changes.step[place]::INTEGER AS step, changes.slot[place] AS slot,
  changes.blueprint[place] AS blueprint, MAP {_STAGE_NAMES}[changes.source[place]] AS source,
  MAP {_STAGE_NAMES}[changes.target[place]] AS target, MAP {_CAUSES}[changes.cause[place]] AS cause
FROM (SELECT *, unnest(range(1, len(changes.step) + 1)) AS place FROM
  (SELECT round, task, env, {_PARSED} AS changes FROM log.stages))
"""
"""A row per change. `place` counts those of an episode."""


def checked_stages(lines: str) -> str:
    """SQL of the lines of episodes, with NULL for stages that `changes_of` would refuse."""
    # `from_json` makes texts and numbers of nearly anything, so the lists are checked as they stand in the file.
    items = {"step": "UBIGINT", "slot": "VARCHAR", "blueprint": "VARCHAR"}
    structures = {name: f"""'["{item}"]', '["NULL"]'""" for name, item in items.items()}
    conditions = [
        *(f"json_structure(stages->'{name}')::VARCHAR IN ({allowed})" for name, allowed in structures.items()),
        *(f"list_count(parsed.{name}) = len(parsed.step)" for name in ("step", "slot")),  # counts what is not NULL
        *(f"len(parsed.{name}) = len(parsed.step)" for name in ("slot", "blueprint", "source", "target", "cause")),
        f"regexp_full_match(parsed.source || parsed.target, '[{''.join(_STAGES)}]*')",
        f"regexp_full_match(parsed.cause, '[{''.join(_CAUSES)}]*')",
    ]
    return f"""
SELECT round, task, env, CASE WHEN {" AND ".join(conditions)} THEN stages END AS stages
FROM (SELECT *, {_PARSED} AS parsed FROM ({lines}))
"""
