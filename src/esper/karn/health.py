"""Panels of the learner's health: every number that the update reported, over rounds.

A panel names its columns by patterns, in which `*` is any head. Columns that no panel names get one each; those that
never changed are listed in words; those that are missing are not drawn.
"""

import re
from typing import TYPE_CHECKING, NamedTuple

from esper.karn import colours
from esper.karn.canvas import legend_above, log_scale, new_figure, style, whole_ticks
from esper.karn.curves import gaps
from esper.karn.reading import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """Columns that are looked at together."""

    title: str
    patterns: tuple[str, ...]
    meaning: str
    log: bool = False


PANELS = (
    Panel(
        "KL of the joint action",
        ("ppo/approx_kl", "ppo/max_kl", "ppo/head_kl_mean"),
        "How far an update moved the policy; the dotted line is the target, at 1.5 times it the update stops.",
    ),
    Panel("KL per head", ("ppo/*/kl",), "Which part of the decision moved."),
    Panel(
        "Clip fraction",
        ("ppo/clip_fraction", "ppo/*/clip_fraction"),
        "Share of decisions whose ratio left the clip range; much above 0.2 the steps are too large.",
    ),
    Panel(
        "Entropy",
        ("ppo/entropy", "ppo/*/entropy"),
        "1 is a fair choice among legal actions, 0 a certain one, over the steps that used the head.",
    ),
    Panel(
        "Explained variance",
        ("ppo/explained_variance",),
        "1: the critic foresees all of the return; 0: as good as its mean.",
    ),
    Panel("Value loss", ("ppo/value_loss",), "Squared error of normalised returns."),
    Panel("Policy loss", ("ppo/policy_loss",), "The clipped surrogate; its size says little, a jump says something."),
    Panel(
        "Gradient norms",
        ("ppo/pre_clip_grad_norm", "ppo/*/grad_norm"),
        "Before clipping: the largest of all weights together, and of each head's own, mean over minibatches.",
        log=True,
    ),
    Panel("Clip factor", ("ppo/clip_factor",), "What gradient clipping multiplied by; 1: nothing was clipped."),
    Panel(
        "Ratio of the joint action",
        ("ppo/joint_ratio_max", "ppo/joint_ratio_min"),
        "New over old probability of a decision, its extremes.",
        log=True,
    ),
    Panel(
        "Returns and values",
        ("ppo/return_mean", "ppo/value_mean", "ppo/return_std"),
        "Points to come, as they came and as the critic expected them.",
    ),
    Panel(
        "Advantages",
        ("ppo/advantage_mean", "ppo/advantage_std"),
        "Before standardising, over steps that decided something.",
    ),
    Panel("Logit spread", ("ppo/logit_spread",), "How decided the heads are, before masks."),
    Panel(
        "What heads learn from",
        ("ppo/*/learnable_fraction", "ppo/forced_fraction"),
        "Share of steps that taught a head, and share of steps with one legal action.",
    ),
    Panel(
        "Exploration",
        ("ppo/epsilon", "ppo/entropy_coefficient"),
        "Schedules: uniform share of actions, weight of entropy.",
    ),
    Panel("Learning rate", ("ppo/rate",), "The optimiser's step size, as its schedule has it."),
    Panel(
        "Behaviour gap",
        ("ppo/behaviour_gap",),
        "Largest difference between a log-probability collected and recomputed; above 1e-3 something is wrong.",
    ),
    Panel(
        "Work of an update",
        ("ppo/minibatches_taken", "ppo/epochs_run", "ppo/minibatches_not_finite"),
        "Fewer than planned: the KL stopped it.",
    ),
    Panel("Stopped by KL", ("ppo/stopped_by_kl",), "1: the KL stopped the update before its last minibatch."),
    Panel("Reward by part", ("reward/*",), "Sum over an episode, mean over hosts, in points."),
    Panel("Panics", ("panics",), "Hosts that the governor took back to a snapshot."),
    Panel("Time", ("timing/*",), "Seconds that each part of a round took."),
)
ROUNDING = 1e-6
"""What changes by less over a run did not change"""
_ELSEWHERE = ("objective", "objective_std", "gain", "accuracy", "added_parameters", "committed")
"""Columns that have a picture or a table of their own"""


def columns_of(run: Run, panel: Panel) -> list[str]:
    """The columns that the run has for a panel, in the order of its patterns."""
    found: dict[str, None] = {}
    for pattern in panel.patterns:
        wanted = re.compile(re.escape(pattern).replace(r"\*", "[^/]+"))
        found |= dict.fromkeys(name for name in run.column_names if wanted.fullmatch(name))
    return list(found)


def panels_of(run: Run) -> tuple[list[tuple[Panel, list[str]]], list[tuple[str, float]]]:
    """What is drawn: panels with their columns; and what never changed over the rounds: (column, value)."""
    constant = {name: value for name in run.column_names if (value := _constant(run, name)) is not None}
    drawn = []
    covered: set[str] = set(_ELSEWHERE)
    for panel in PANELS:
        columns = columns_of(run, panel)
        covered |= set(columns)
        if not all(name in constant for name in columns):
            drawn.append((panel, columns))
    others = [name for name in run.column_names if name not in covered and name not in constant]
    drawn += [(Panel(name, (name,), f"The column {name} of the metrics."), [name]) for name in others]
    shown = {name for _, columns in drawn for name in columns}
    return drawn, [(name, value) for name, value in constant.items() if name not in shown and name not in _ELSEWHERE]


def _constant(run: Run, name: str) -> float | None:
    """The last value of a column that is the same in all of several rounds, but for rounding."""
    values = [value for value in run.series(name) if value is not None]
    if len(values) < len(run.rounds) or len(values) < 2:
        return None
    return values[-1] if max(values) - min(values) <= ROUNDING * max(1.0, abs(values[-1])) else None


def draw_panel(run: Run, panel: Panel, columns: list[str]) -> "Figure":
    """One panel, a line per column."""
    rounds = [entry.number for entry in run.rounds]
    with style():
        figure = new_figure(3.7, 2.5)
        axis = figure.subplots()
        for name in columns:
            colour = _colour(run, columns, name).light
            axis.plot(rounds, gaps(run.series(name)), color=colour, marker="o", markersize=2.5, label=short_name(name))
        if panel.log and all(value > 0 for name in columns for value in run.series(name) if value is not None):
            log_scale(axis)
        target = run.setting("ppo", "target_kl")
        if "ppo/approx_kl" in columns and isinstance(target, int | float):
            axis.axhline(target, color=colours.MUTED.light, linestyle=":", linewidth=1)
        axis.set(title=panel.title, xlabel="round")
        axis.grid(axis="y")
        whole_ticks(axis)
        legend_above(axis, 3.7)
    return figure


def _colour(run: Run, columns: list[str], name: str) -> colours.Colour:
    """A head has the same colour in every panel, and what is of all heads together is muted beside them."""
    heads = list(dict.fromkeys(column.split("/")[1] for column in run.column_names if _is_of_head(column)))
    if _is_of_head(name):
        place = heads.index(name.split("/")[1])
    elif any(_is_of_head(column) for column in columns):
        return colours.MUTED
    else:
        place = columns.index(name)
    return colours.SERIES[place % len(colours.SERIES)]


def _is_of_head(column: str) -> bool:
    return column.startswith("ppo/") and column.count("/") == 2


def short_name(column: str) -> str:
    """`ppo/slot/entropy` → slot, where the title says entropy; else the last part in words."""
    parts = column.split("/")
    return (parts[1] if len(parts) == 3 else parts[-1]).replace("_", " ")
