"""The views of a run, their columns, and how they follow from the events.

`LOGS` are the tables `log.<name>` of lines in `events.jsonl`, which `queries` fills only where a statement needs them.
`VIEWS` are what statements see.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from esper.karn.stage_columns import CHANGES_SQL, checked_stages
from esper.leyline import HEAD_NAMES, LIVE_STAGES


class Log(NamedTuple):
    """A table of lines of one kind: the keys that are read, with their types."""

    kind: str
    columns: Mapping[str, str]
    required: tuple[str, ...]
    """Without one of these a line is damaged"""
    checked: Callable[[str], str] = str
    """From the SQL of the lines to one that has NULL in place of what is wrong inside a column"""


class SqlView(NamedTuple):
    """One table that statements can name."""

    meaning: str
    columns: Mapping[str, tuple[str, str]]
    """Name → type, meaning"""
    sql: str
    log: str | None = None
    """The table that it is made of"""


_ROUND = {"round": ("INTEGER", "the round, from 0")}
_EPISODE = {
    **_ROUND,
    "task": ("VARCHAR", "the task that the host is of"),
    "env": ("INTEGER", "the growing host, numbered over all tasks"),
}
_STEP = {"step": ("INTEGER", "the step, from 0: its decision comes before its training, ticks and panics after it")}

_DECISIONS_SQL = f"""
SELECT round, task, env, step, coalesce(decisions.op[place], 'WAIT') AS op,
  {", ".join(f"decisions.{name}[place] AS {name}" for name in HEAD_NAMES if name != "op")},
  rewards[step + 1] AS reward, accuracies[step + 1] AS accuracy, control_accuracies[step + 1] AS control_accuracy
FROM (SELECT *, list_position(decisions.step, step) AS place FROM
  (SELECT *, unnest(range(len(rewards)))::INTEGER AS step FROM log.episode))
"""

CHANGES: Mapping[str, str] = {"round": CHANGES_SQL, "step": "SELECT *, rowid AS place FROM log.stage"}
"""By what the metrics count: a row per change of stage. Those of a host are in order of `place`."""

# A life begins with a birth, and every change in its slot is its own until the next birth. A panic can take back any
# of them, the end too: whether and how a life ended is seen from its last change.
_LIVE = ", ".join(f"'{stage.name}'" for stage in sorted(LIVE_STAGES))
_SEEDS_SQL = f"""
SELECT round, task, env, slot, blueprint, germinated_at, blending_at, holding_at,
  CASE WHEN last = 'FOSSILIZED' THEN 'committed' WHEN last IN ({_LIVE}) THEN 'uncommitted'
    WHEN ending.cause = 'panic' THEN 'undone' ELSE 'pruned' END AS outcome,
  CASE WHEN last = 'FOSSILIZED' THEN kept.step WHEN last NOT IN ({_LIVE}) THEN ending.step END AS ended_at,
  CASE WHEN last = 'FOSSILIZED' THEN kept.cause WHEN last NOT IN ({_LIVE}) THEN ending.cause END AS cause,
  stages
FROM (
  SELECT round, any_value(task) AS task, env, slot, arg_min(blueprint, place) AS blueprint,
    arg_min(step, place) AS germinated_at,
    min(step) FILTER (WHERE target = 'BLENDING') AS blending_at,
    min(step) FILTER (WHERE target = 'HOLDING') AS holding_at,
    arg_max(target, place) AS last,
    arg_max({{'step': step, 'cause': cause}}, place) FILTER (WHERE target = 'FOSSILIZED') AS kept,
    arg_max({{'step': step, 'cause': cause}}, place)
      FILTER (WHERE source IN ({_LIVE}) AND target NOT IN ({_LIVE})) AS ending,
    list(target ORDER BY place) AS stages
  FROM (
    SELECT *, sum((source = 'DORMANT' AND target = 'GERMINATED' AND cause <> 'panic')::INTEGER)
      OVER (PARTITION BY round, env, slot ORDER BY place) AS life
    FROM log.changes
  )
  WHERE life > 0
  GROUP BY round, env, slot, life
)
"""

VIEWS: Mapping[str, SqlView] = {
    "rounds": SqlView(
        "A row per complete round, with means over its episodes. Every other number of metrics.jsonl is a column too,"
        " named in lower case with _ for /: reward_gain, ops_wait, ppo_approx_kl, timing_collect_s …",
        {
            **_ROUND,
            "objective": ("DOUBLE", "gain minus the rent of the fossils, points"),
            "objective_std": ("DOUBLE", "its standard deviation over episodes"),
            "gain": ("DOUBLE", "of the hardened hosts over their controls, points"),
            "accuracy": ("DOUBLE", "of the hardened hosts, percent"),
            "added_parameters": ("DOUBLE", "of the fossils"),
            "committed": ("DOUBLE", "share of episodes that committed a seed"),
            "panics": ("INTEGER", "of the governor, in all"),
        },
        "FROM log.rounds",
    ),
    "episodes": SqlView(
        "A row per episode: the life of one growing host.",
        {
            **_EPISODE,
            "objective": ("DOUBLE", "gain minus the rent of the fossils, points"),
            "gain": ("DOUBLE", "of the hardened host over its control, points"),
            "accuracy": ("DOUBLE", "of the hardened host, percent"),
            "added_parameters": ("BIGINT", "of its fossils"),
            "reward": ("DOUBLE", "all that its decisions were paid"),
            "accuracies": ("DOUBLE[]", "of the growing host after every step, percent"),
            "control_accuracies": ("DOUBLE[]", "of its control, which never grows"),
            "alphas": ("MAP(VARCHAR, DOUBLE[])", "slot → alpha that each step was trained with"),
        },
        "SELECT round, task, env, objective, gain, accuracy, added_parameters::BIGINT AS added_parameters,"
        " list_sum(rewards) AS reward, accuracies, control_accuracies, alphas FROM log.episode",
        "episode",
    ),
    "decisions": SqlView(
        "A row per episode and step: what the policy chose, and what came of it. Heads are NULL where they say nothing"
        " about the op, or where the run's preset lacks them.",
        {
            **_EPISODE,
            **_STEP,
            "op": ("VARCHAR", "WAIT, GERMINATE, ADVANCE, FOSSILIZE, PRUNE or SET_ALPHA_TARGET"),
            "slot": ("VARCHAR", "where"),
            "blueprint": ("VARCHAR", "what was germinated"),
            "blend": ("VARCHAR", "how a seed is blended in"),
            "tempo": ("INTEGER", "steps that its blending takes"),
            "alpha_target": ("DOUBLE", "alpha that it is to reach"),
            "alpha_speed": ("INTEGER", "steps that a change of alpha takes"),
            "alpha_curve": ("VARCHAR", "on which curve"),
            "reward": ("DOUBLE", "what the step was paid"),
            "accuracy": ("DOUBLE", "of the host after the step, percent"),
            "control_accuracy": ("DOUBLE", "of its control"),
        },
        _DECISIONS_SQL,
        "episode",
    ),
    "rewards": SqlView(
        "A row per episode and part of its reward.",
        {
            **_EPISODE,
            "part": ("VARCHAR", "shaping, gain, rent, penalty …: the parts of the run's reward family"),
            "points": ("DOUBLE", "its sum over the episode"),
        },
        "SELECT round, task, env, unnest(map_keys(reward_parts)) AS part, unnest(map_values(reward_parts)) AS points"
        " FROM log.episode",
        "episode",
    ),
    "seeds": SqlView(
        "A row per seed, from its birth to its end.",
        {
            **_EPISODE,
            "slot": ("VARCHAR", "where it grew"),
            "blueprint": ("VARCHAR", "what it was"),
            "germinated_at": ("INTEGER", "step of its birth"),
            "blending_at": ("INTEGER", "step at which it first entered BLENDING; NULL if it never did"),
            "holding_at": ("INTEGER", "step at which it first entered HOLDING; NULL if it never did"),
            "outcome": (
                "VARCHAR",
                "committed, pruned, undone (a panic took its birth back), or uncommitted: alive when the episode"
                " ended, and dropped by hardening",
            ),
            "ended_at": ("INTEGER", "step at which it was committed, pruned or undone; NULL if uncommitted"),
            "cause": ("VARCHAR", "of that: fossilize, prune, tick (the end of a slow prune), panic"),
            "stages": ("VARCHAR[]", "all stages that it went through, and those of its slot's rest, in order"),
        },
        _SEEDS_SQL,
        "stages",
    ),
    "stages": SqlView(
        "A row per change of a slot's stage, ordered by round, host and time.",
        {
            **_EPISODE,
            **_STEP,
            "slot": ("VARCHAR", "whose"),
            "blueprint": ("VARCHAR", "of the seed in it"),
            "source": ("VARCHAR", "the stage before"),
            "target": ("VARCHAR", "the stage after"),
            "cause": ("VARCHAR", "the op, tick, or panic"),
        },
        "SELECT * EXCLUDE (place) FROM log.changes",
        "stages",
    ),
    "panics": SqlView(
        "A row per panic: the governor took a host back to its snapshot.",
        {**_EPISODE, **_STEP, "symptoms": ("VARCHAR[]", "what the governor saw")},
        "FROM log.panic",
        "panic",
    ),
    "suspects": SqlView(
        "A row per seed that looked better than it was, and per suspicion, at the first such step.",
        {
            **_EPISODE,
            **_STEP,
            "slot": ("VARCHAR", "where it is"),
            "suspicion": (
                "VARCHAR",
                "hacking: contributes far more than its host has gained; ransomware: its host"
                " would lose by its going, and has gained nothing by its coming",
            ),
            "severity": ("VARCHAR", "warning or critical"),
            "contribution": ("DOUBLE", "what the host would lose without it, points"),
            "gain": ("DOUBLE", "what the host has over its control, points"),
        },
        "FROM log.suspect",
        "suspect",
    ),
    "alarms": SqlView(
        "A row per alarm that began or ended.",
        {
            **_ROUND,
            "alarm": ("VARCHAR", "its kind, as in docs/telemetry.md"),
            "severity": ("VARCHAR", "info, warning or critical"),
            "subject": ("VARCHAR", "the head that it is about; empty where it is about the whole"),
            "ended": ("BOOLEAN", "whether it ended here; if not, it began"),
            "value": ("DOUBLE", "what was measured"),
            "threshold": ("DOUBLE", "its limit; NULL where there is no number for it"),
            "cause": ("VARCHAR", "in words"),
            "remedy": ("VARCHAR", "what to do"),
        },
        'SELECT round, alarm, severity, subject, ended, value, "limit" AS threshold, cause, remedy FROM log.alarm',
        "alarm",
    ),
}


def _types(view: str) -> dict[str, str]:
    return {name: type_ for name, (type_, _) in VIEWS[view].columns.items()}


_DECISIONS = ", ".join(f"{name} {_types('decisions')[name]}[]" for name in ("step", *HEAD_NAMES))
LOGS: Mapping[str, Log] = {
    "stage": Log("stage", _types("stages"), ("round", "env", "step", "slot", "source", "target", "cause")),
    "stages": Log(
        "episode",
        {**{name: type_ for name, (type_, _) in _EPISODE.items()}, "stages": "JSON"},
        ("round", "env", "stages"),
        checked_stages,
    ),
    "panic": Log("panic", _types("panics"), ("round", "env", "step")),
    "suspect": Log("suspect", _types("suspects"), ("round", "env", "step", "slot", "suspicion")),
    "episode": Log(
        "episode",
        {
            **_types("episodes"),
            "added_parameters": "DOUBLE",
            "rewards": "DOUBLE[]",
            "decisions": f"STRUCT({_DECISIONS})",
            "reward_parts": "MAP(VARCHAR, DOUBLE)",
        },
        ("round", "env", "objective", "gain", "accuracy", "added_parameters"),
    ),
    "alarm": Log(
        "alarm",
        {"limit" if name == "threshold" else name: type_ for name, type_ in _types("alarms").items()},
        ("round", "alarm", "severity"),
    ),
}


# -- the run of a Grower ----------------------------------------------------------------------------------------------


def _of_one_model(name: str) -> SqlView:
    """A view without the columns that are the same in all rows, because there is one model."""
    view = VIEWS[name]
    columns = {column: entry for column, entry in view.columns.items() if column not in _EPISODE}
    columns |= {column: entry for column, entry in {**_GROWER_STEP, **_OUTCOME}.items() if column in columns}
    return view._replace(
        meaning=view.meaning.replace("round, host and time", "time"),
        columns=columns,
        sql=f"SELECT {', '.join(columns)} FROM ({view.sql})",
        log="stage" if view.log == "stages" else view.log,
    )


_GROWER_STEP = {"step": ("INTEGER", "the step, from 1, as it was printed")}
_OUTCOME = {"outcome": ("VARCHAR", "committed, pruned, or uncommitted: alive after the last step")}
GROWER_VIEWS: Mapping[str, SqlView] = {
    "steps": SqlView(
        "A row per complete step of a Grower. Every other number of metrics.jsonl is a column too: timing_step_s …",
        {
            **_GROWER_STEP,
            "accuracy": ("DOUBLE", "on the validation data, percent; NULL with a loss of your own"),
            "loss": ("DOUBLE", "mean validation loss"),
            "grown": ("BIGINT", "parameters of all seeds after the step"),
        },
        "FROM log.steps",
    ),
    "contributions": SqlView(
        "A row per step and seed that is not committed: what silencing it would cost.",
        {
            **_GROWER_STEP,
            "slot": ("VARCHAR", "where it is"),
            "contribution": ("DOUBLE", "points of accuracy, or percent of a loss of your own"),
            "error": ("DOUBLE", "its standard error"),
        },
        "FROM log.contributions",
    ),
    **{name: _of_one_model(name) for name in ("seeds", "stages", "panics")},
}
"""What statements about the run of a Grower see"""
