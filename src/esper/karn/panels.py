"""Panels: which columns of a run are shown together, and how.

A panel names its columns by patterns, in which `*` is any head. Columns that no panel names get one each; those that
never changed are listed in words; those that are missing are not drawn.
"""

import re
from collections import Counter
from itertools import cycle
from typing import TYPE_CHECKING, Literal, NamedTuple

from esper.karn.canvas import new_figure, whole_ticks
from esper.karn.palette import MUTED, SERIES
from esper.karn.state import HEADLINES, Round, RunState
from esper.leyline import LifecycleOp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Band = Literal["hosts", "share"]
"""Behind a line: the middle half of the hosts, or one standard error of a share of hosts."""
Line = tuple[str, list[float | None], str]
"""Label, values over rounds, and colour."""


class Panel(NamedTuple):
    """Columns that are looked at together."""

    title: str
    patterns: tuple[str, ...]
    meaning: str
    unit: str = ""
    log: bool = False
    zero: bool = False
    """Mark zero with a line"""
    band: Band | None = None
    width: float = 3.7
    """Inches"""


def _learning(column: str, title: str, unit: str, band: Band, *, zero: bool = False) -> Panel:
    spread = "the middle half of hosts" if band == "hosts" else "one standard error of such a share"
    text = f"{title} after every round: the line is the mean over hosts, the band {spread}."
    return Panel(title, (column,), text, unit, zero=zero, band=band, width=5.2)


LEARNING = (
    _learning("objective", "Objective", "points", "hosts", zero=True),
    _learning("gain", "Gain of committed seeds", "points", "hosts", zero=True),
    _learning("added_parameters", "Added parameters", "parameters per host", "hosts"),
    _learning("committed", "Hosts with a committed seed", "share of hosts", "share"),
)
OPS = Panel("Decisions by op", (), "Share of each op among all decisions of a round.", "% of decisions", width=10)
HEALTH = (
    Panel("KL of the joint action", ("ppo/approx_kl", "ppo/max_kl", "ppo/head_kl_mean"),
          "How far an update moved the policy. The dotted line is the target; at 1.5 times it the update stops."),
    Panel("KL per head", ("ppo/*/kl",), "Which part of the decision moved."),
    Panel("Clip fraction", ("ppo/clip_fraction", "ppo/*/clip_fraction"),
          "Share of decisions whose ratio left the clip range. Much above 0.2 the steps are too large."),
    Panel("Entropy", ("ppo/entropy", "ppo/*/entropy"),
          "1 is a fair choice among legal actions, 0 a certain one, over the steps that used the head."),
    Panel("Explained variance", ("ppo/explained_variance",),
          "1: the critic foresees all of the return. 0: it is as good as the mean."),
    Panel("Value loss", ("ppo/value_loss",), "Squared error of normalised returns."),
    Panel("Policy loss", ("ppo/policy_loss",), "The clipped surrogate. Its size says little; a jump matters."),
    Panel("Gradient norms", ("ppo/pre_clip_grad_norm", "ppo/*/grad_norm"),
          "Before clipping: the largest of all weights together, and of each head's own, mean over minibatches.",
          log=True),
    Panel("Clip factor", ("ppo/clip_factor",), "The factor of gradient clipping. 1: nothing was clipped."),
    Panel("Ratio of the joint action", ("ppo/joint_ratio_max", "ppo/joint_ratio_min"),
          "New over old probability of a decision, its extremes.", log=True),
    Panel("Returns and values", ("ppo/return_mean", "ppo/value_mean", "ppo/return_std"),
          "Returns in points, and what the critic expected."),
    Panel("Advantages", ("ppo/advantage_mean", "ppo/advantage_std"),
          "Before standardising, over steps with a choice."),
    Panel("Logit spread", ("ppo/logit_spread",), "How decided the heads are, before masks."),
    Panel("What heads learn from", ("ppo/*/learnable_fraction", "ppo/forced_fraction"),
          "Share of steps that taught a head, and share of steps with one legal action."),
    Panel("Exploration", ("ppo/epsilon", "ppo/entropy_coefficient"),
          "Schedules: uniform share of actions, weight of entropy."),
    Panel("Learning rate", ("ppo/rate",), "The optimiser's step size."),
    Panel("Behaviour gap", ("ppo/behaviour_gap",),
          "Largest difference between a log-probability collected and recomputed. Above 1e-3 something is wrong."),
    Panel("Work of an update", ("ppo/minibatches_taken", "ppo/epochs_run", "ppo/minibatches_not_finite"),
          "Fewer than planned: the KL stopped it."),
    Panel("Stopped by KL", ("ppo/stopped_by_kl",), "1: the KL stopped the update before its last minibatch."),
    Panel("Reward by part", ("reward/*",), "Sum over an episode, mean over hosts, in points."),
    Panel("Panics", ("panics",), "Hosts that the governor restored."),
    Panel("Time", ("timing/*",), "Seconds that each part of a round took."),
)  # fmt: skip
ROUNDING = 1e-6
"""What changes by less over a run did not change"""
MOST_MARKED, MOST_BANDED = 200, 300
"""With more rounds, curves have no marks, and bands are drawn at some of the rounds only"""


def columns_of(run: RunState, panel: Panel) -> list[str]:
    """The columns that the run has for a panel, in the order of its patterns."""
    patterns = [re.escape(pattern).replace(r"\*", "[^/]+") for pattern in panel.patterns]
    names = (name for pattern in patterns for name in run.column_names if re.fullmatch(pattern, name))
    return list(dict.fromkeys(names))


def health_panels(run: RunState) -> tuple[list[Panel], dict[str, float]]:
    """The panels to draw, and the columns that never changed with their values."""
    values = {name: _constant(run, name) for name in run.column_names if name == "panics" or name not in HEADLINES}
    columns = {panel: columns_of(run, panel) for panel in HEALTH}
    drawn = [panel for panel, names in columns.items() if any(values[name] is None for name in names)]
    covered = {name for names in columns.values() for name in names}
    others = [name for name, value in values.items() if name not in covered and value is None]
    drawn += [Panel(name, (name,), f"The column {name} of the metrics.") for name in others]
    shown = {name for panel in drawn for name in columns.get(panel, [])}
    return drawn, {name: value for name, value in values.items() if value is not None and name not in shown}


def _constant(run: RunState, name: str) -> float | None:
    """The last value of a column that is the same in all of several rounds, up to rounding."""
    values = [value for value in run.series(name) if value is not None]
    if len(values) < max(2, len(run.rounds)):
        return None
    return values[-1] if max(values) - min(values) <= ROUNDING * max(1.0, abs(values[-1])) else None


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw_panel(run: RunState, panel: Panel) -> "Figure":
    """A line per column; of several tasks, a learning curve has a line per task and no band."""
    columns = columns_of(run, panel)
    if panel.band and run.tasks:
        series = [run.series(f"tasks/{task}/{columns[0]}") for task in run.tasks]
        return _draw_lines(run, panel, list(zip(run.tasks, series, cycle(SERIES), strict=False)))
    lines = [(short_name(name), run.series(name), _colour(run, columns, name)) for name in columns]
    band = _band(run, columns[0], panel.band) if panel.band else None
    target = run.setting("ppo", "target_kl") if "ppo/approx_kl" in columns else None
    return _draw_lines(run, panel, lines, band, target if isinstance(target, int | float) else None)


def draw_ops(run: RunState) -> "Figure":
    """The share of each op among all decisions of a round."""
    totals = [max(1, sum(entry.ops.values())) for entry in run.rounds]
    lines: list[Line] = [
        (op.lower(), [100 * entry.ops.get(op, 0) / n for entry, n in zip(run.rounds, totals, strict=True)], colour)
        for op, colour in zip(ops_of(run), SERIES, strict=False)
    ]
    figure = _draw_lines(run, OPS, lines)
    figure.axes[0].set_ylim(bottom=0)
    return figure


def _draw_lines(
    run: RunState,
    panel: Panel,
    lines: list[Line],
    band: list[tuple[float | None, float | None]] | None = None,
    target: float | None = None,
) -> "Figure":
    """Lines over rounds, with a band behind the first and a dotted line at a target."""
    rounds = [entry.number for entry in run.rounds]
    with new_figure(panel.width, 2.5 if panel.width < 4 else 2.8) as figure:
        axis = figure.subplots()
        if band is not None:
            low, high = (gaps(list(ends)) for ends in zip(*band, strict=True))
            own = [entry.number for entry in banded(run)]
            axis.fill_between(own, low, high, color=lines[0][2], alpha=0.18, linewidth=0)
        marker = "o" if len(rounds) <= MOST_MARKED else None
        for label, values, colour in lines:
            axis.plot(rounds, gaps(values), color=colour, marker=marker, markersize=2.8, label=label)
        if panel.log and all(value > 0 for _, values, _ in lines for value in values if value is not None):
            _log_scale(axis)
        for height in [0.0] * panel.zero + ([] if target is None else [target]):
            axis.axhline(height, color=MUTED, linewidth=0.9, linestyle=":")
        axis.set(title=panel.title, ylabel=panel.unit, xlabel="round")
        axis.grid(axis="y")
        whole_ticks(axis)
        _legend_above(axis, panel.width)
    return figure


def _log_scale(axis: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _legend_above(axis: "Axes", inches: float) -> None:
    """Between title and axes, where no line can pass under it; as many columns as fit into `inches`."""
    _, labels = axis.get_legend_handles_labels()
    if len(labels) > 1:
        letters = max(len(label) for label in labels) + 5  # the sign takes the room of five
        columns = max(1, min(len(labels), int(15 * inches) // letters))
        rows = -(-len(labels) // columns)
        axis.set_title(axis.get_title(loc="left"), pad=6 + 12 * rows)
        axis.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.4,
            columnspacing=1.0, handletextpad=0.5, borderpad=0.2,
        )  # fmt: skip


def banded(run: RunState) -> list[Round]:
    """The rounds at which bands are drawn: all, or every so many of a long run."""
    every = max(1, len(run.rounds) // MOST_BANDED)
    return run.rounds[::-1][::every][::-1]  # the last one is among them


def _band(run: RunState, column: str, band: Band) -> list[tuple[float | None, float | None]]:
    """Lower and upper end of every such round; None where a round has no episodes or no such number."""
    import numpy as np

    ends: list[tuple[float | None, float | None]] = []
    for entry in banded(run):
        episodes, value = run.episodes.get(entry.number, []), entry.columns.get(column)
        if not episodes or value is None:
            ends.append((None, None))
        elif band == "hosts":
            low, high = np.quantile([getattr(episode, column) for episode in episodes], (0.25, 0.75))
            ends.append((float(low), float(high)))
        else:
            error = (max(0.0, value * (1 - value)) / len(episodes)) ** 0.5
            ends.append((max(0.0, value - error), min(1.0, value + error)))
    return ends


def gaps(values: list[float | None]) -> list[float]:
    """For drawing: a line is broken where there is no number."""
    return [float("nan") if value is None else value for value in values]


def _colour(run: RunState, columns: list[str], name: str) -> str:
    """A head has the same colour in every panel; a figure of all heads together is muted beside them."""
    index = columns.index(name)
    if _is_of_head(name):
        heads = list(dict.fromkeys(column.split("/")[1] for column in run.column_names if _is_of_head(column)))
        index = heads.index(name.split("/")[1])
    elif any(map(_is_of_head, columns)):
        return MUTED
    return SERIES[index % len(SERIES)]


def _is_of_head(column: str) -> bool:
    return column.startswith("ppo/") and column.count("/") == 2


def short_name(column: str) -> str:
    """`ppo/slot/entropy` → slot, because the title says entropy; else the last part in words."""
    parts = column.split("/")
    return (parts[1] if len(parts) == 3 else parts[-1]).replace("_", " ")


# -- decisions --------------------------------------------------------------------------------------------------------

MOST_ROWS = 24
"""Kinds of seed that a map names; the rest share a row"""
OTHERS = "all others"


def ops_of(run: RunState) -> list[str]:
    """Every op that was used, in the order of the table, then others."""
    used = {op for entry in run.rounds for op in entry.ops}
    known = [op.name for op in LifecycleOp if op.name in used]
    return known + sorted(used - set(known))


def seed_counts(run: RunState) -> dict[str, list[Counter[str]]]:
    """Germinations and commits: per round, `slot/blueprint` → how many."""
    commits = run.commits
    return {
        "Germinations": [Counter(entry.germinated) for entry in run.rounds],
        "Commits": [Counter(f"{c.slot}/{c.blueprint}" for c in commits.get(entry.number, [])) for entry in run.rounds],
    }


def rows_of(run: RunState) -> list[str]:
    """The kinds of seed that the maps show, by slot; the rarest share the last row."""
    total = sum((counts for rounds in seed_counts(run).values() for counts in rounds), Counter[str]())
    names = [name for name, _ in total.most_common(MOST_ROWS if len(total) <= MOST_ROWS else MOST_ROWS - 1)]
    slots = {slot: index for index, slot in enumerate(run.slots)}
    names.sort(key=lambda name: (slots.get(name.split("/")[0], len(slots)), name))
    return [*names, OTHERS] if len(names) < len(total) else names


def draw_decisions(run: RunState) -> "Figure":
    """Two maps over rounds, one row per kind of seed: germinations and commits per host."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    rows = rows_of(run)
    # Without its darkest quarter, which a dark page would swallow.
    shading = ListedColormap(colormaps["viridis"](np.linspace(0.25, 1.0, 64)))
    hosts = [max(1, len(run.episodes.get(entry.number, []))) for entry in run.rounds]
    edges = (run.rounds[0].number - 0.5, run.rounds[-1].number + 0.5, len(rows) - 0.5, -0.5)
    with new_figure(10.0, 1.5 + 0.19 * len(rows)) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (title, rounds) in zip(axes, seed_counts(run).items(), strict=True):
            for counts in rounds:
                counts[OTHERS] = counts.total() - sum(counts[row] for row in rows)
            cells = [[counts[row] / n for counts, n in zip(rounds, hosts, strict=True)] for row in rows]
            shades = np.ma.masked_equal(np.array(cells), 0.0)  # never: the page shows through
            image = axis.imshow(shades, aspect="auto", interpolation="none", extent=edges, cmap=shading, vmin=0)
            axis.set(title=title, xlabel="round")
            axis.set_yticks(range(len(rows)), rows)
            axis.tick_params(axis="y", length=0)
            whole_ticks(axis)
            bar = figure.colorbar(image, ax=axis, pad=0.02, aspect=30)
            bar.set_label("per host")
            bar.outline.set_visible(False)
    return figure
