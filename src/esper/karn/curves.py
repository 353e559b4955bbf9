"""Pictures over rounds: what was learned, and what was decided."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from esper.karn import colours
from esper.karn.canvas import legend_above, new_figure, style, whole_ticks
from esper.karn.reading import Run
from esper.leyline import LifecycleOp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 24
"""Kinds of seed that a map names; the rest share a row"""
OTHERS = "all others"


class Curve(NamedTuple):
    """A column of the metrics and how it is shown."""

    column: str
    title: str
    unit: str
    of_host: str | None
    """The same figure of one host; None where only the round has it"""


LEARNING = (
    Curve("objective", "Objective", "points", "objective"),
    Curve("gain", "Gain over the control", "points", "gain"),
    Curve("added_parameters", "Added parameters", "parameters per host", "added_parameters"),
    Curve("committed", "Hosts with a committed seed", "share of hosts", None),
)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The ends of the middle half, between the values of neighbours."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.25), at(0.75)


def gaps(values: Sequence[float | None]) -> list[float]:
    """For drawing: a line is broken where there is no number."""
    return [float("nan") if value is None else value for value in values]


def draw_learning(run: Run, curve: Curve) -> "Figure":
    """One figure of the rounds, with the middle half of hosts behind it; for a share, its standard error. Of several
    tasks, a line each, and no band."""
    rounds = [entry.number for entry in run.rounds]
    values = run.series(curve.column)
    with style():
        figure = new_figure(5.2, 2.8)
        axis = figure.subplots()
        if run.tasks:
            for task, colour in zip(run.tasks, cycle(colours.SERIES)):
                series = gaps(run.series(f"tasks/{task}/{curve.column}"))
                axis.plot(rounds, series, color=colour.light, marker="o", markersize=3, label=task)
        else:
            low, high = _spread(run, curve, values)
            axis.fill_between(rounds, gaps(low), gaps(high), color=colours.BLUE.light, alpha=0.18, linewidth=0)
            axis.plot(rounds, gaps(values), color=colours.BLUE.light, marker="o", markersize=3)
        if curve.of_host in ("objective", "gain"):
            axis.axhline(0, color=colours.MUTED.light, linewidth=0.8, linestyle=":")
        axis.set(title=curve.title, ylabel=curve.unit, xlabel="round")
        axis.grid(axis="y")
        whole_ticks(axis)
        legend_above(axis, 5.2)
    return figure


def _spread(run: Run, curve: Curve, values: list[float | None]) -> tuple[list[float | None], list[float | None]]:
    low: list[float | None] = []
    high: list[float | None] = []
    for entry, value in zip(run.rounds, values, strict=True):
        episodes = run.episodes.get(entry.number, [])
        if not episodes or value is None:
            ends: tuple[float | None, float | None] = (None, None)
        elif curve.of_host is not None:
            ends = quartiles([getattr(episode, curve.of_host) for episode in episodes])
        else:
            error = (max(0.0, value * (1 - value)) / len(episodes)) ** 0.5
            ends = (max(0.0, value - error), min(1.0, value + error))
        low.append(ends[0])
        high.append(ends[1])
    return low, high


def germinations(run: Run) -> list[Counter[str]]:
    """Per round, `slot/blueprint` → germinations."""
    return [Counter(entry.germinated) for entry in run.rounds]


def commits(run: Run) -> list[Counter[str]]:
    """Per round, `slot/blueprint` → seeds that stayed."""
    return [
        Counter(f"{commit.slot}/{commit.blueprint}" for commit in run.commits.get(entry.number, []))
        for entry in run.rounds
    ]


def rows_of(run: Run) -> list[str]:
    """The kinds of seed that the maps show, by slot; the rarest share the last row."""
    total = sum(germinations(run) + commits(run), Counter())
    kept = [name for name, _ in total.most_common(MOST_ROWS if len(total) <= MOST_ROWS else MOST_ROWS - 1)]
    slots = {slot: place for place, slot in enumerate(run.slots)}
    kept.sort(key=lambda name: (slots.get(name.split("/")[0], len(slots)), name))
    return [*kept, OTHERS] if len(kept) < len(total) else kept


def draw_decisions(run: Run) -> "Figure":
    """Two maps over rounds, kinds of seed by rows: how often a host germinated one, and how often one stayed."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    rows = rows_of(run)
    # Without its darkest quarter, which a dark page would swallow.
    shading = ListedColormap(colormaps["viridis"](np.linspace(0.25, 1.0, 64)))
    hosts = [max(1, len(run.episodes.get(entry.number, []))) for entry in run.rounds]
    with style():
        figure = new_figure(10.0, 1.5 + 0.19 * len(rows))
        axes = figure.subplots(1, 2, sharey=True)
        for axis, counted, title in zip(
            axes, (germinations(run), commits(run)), ("Germinations", "Commits"), strict=True
        ):
            cells = np.array(
                [[_share(counts, row, rows, n) for counts, n in zip(counted, hosts, strict=True)] for row in rows]
            )
            shades = np.ma.masked_equal(cells, 0.0)  # never: the page shows through
            first, last = run.rounds[0].number, run.rounds[-1].number
            image = axis.imshow(
                shades,
                aspect="auto",
                interpolation="none",
                extent=(first - 0.5, last + 0.5, len(rows) - 0.5, -0.5),
                cmap=shading,
                vmin=0,
            )
            axis.set(title=title, xlabel="round")
            axis.set_yticks(range(len(rows)), rows)
            axis.tick_params(axis="y", length=0)
            whole_ticks(axis)
            bar = figure.colorbar(image, ax=axis, pad=0.02, aspect=30)
            bar.set_label("per host")
            bar.outline.set_visible(False)
    return figure


def _share(counts: Counter[str], row: str, rows: list[str], hosts: int) -> float:
    named = set(rows)
    if row == OTHERS:
        return sum(count for name, count in counts.items() if name not in named) / hosts
    return counts[row] / hosts


def draw_ops(run: Run) -> "Figure":
    """What was decided, as shares of all decisions of a round."""
    rounds = [entry.number for entry in run.rounds]
    with style():
        figure = new_figure(10.0, 2.8)
        axis: Axes = figure.subplots()
        for colour, op in zip(colours.SERIES, ops_of(run), strict=False):
            shares = [100 * entry.ops.get(op, 0) / max(1, sum(entry.ops.values())) for entry in run.rounds]
            axis.plot(rounds, shares, color=colour.light, marker="o", markersize=3, label=op.lower())
        axis.set(title="Decisions by op", xlabel="round", ylabel="% of decisions")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y")
        whole_ticks(axis)
        legend_above(axis, 9)
    return figure


def ops_of(run: Run) -> list[str]:
    """Every op that was used, in the order of the table, then others."""
    used = {op for entry in run.rounds for op in entry.ops}
    known = [op.name for op in LifecycleOp if op.name in used]
    return known + sorted(used - set(known))
