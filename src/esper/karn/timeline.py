"""The growth of one host over its steps: what each slot went through, and how the accuracy followed.

The horizontal axis counts steps trained. The decision of step s is taken at s, its training fills s to s + 1, and its
measurements stand at s + 1.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from esper.karn.canvas import new_figure, to_png, whole_ticks
from esper.karn.lines import Episode, StageEvent
from esper.karn.palette import AROUND, BLUE, INK, MUTED, ON_BARS, STAGES, VERMILION
from esper.karn.panels import gaps
from esper.karn.state import RunState, read_run
from esper.leyline import SeedStage, UnknownNameError
from esper.storage.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Standing = Literal["best", "median", "worst"]
STANDINGS: dict[Standing, float] = {"best": 0.0, "median": 0.5, "worst": 1.0}
"""Where in the ranking by objective"""
MARKS = {
    SeedStage.GERMINATED: ("birth", "^"),
    SeedStage.FOSSILIZED: ("commit", "*"),
    SeedStage.PRUNED: ("cut", "X"),
}
"""Stage that a seed entered → name and symbol of its mark"""
_BAR = 0.6
"""Height of a bar in its lane; the name of the blueprint stands above it"""


class Span(NamedTuple):
    """A slot was in one stage for a while."""

    slot: str
    stage: SeedStage
    begin: int
    end: int


def spans_of(changes: Sequence[StageEvent], steps: int) -> list[Span]:
    """Bars of one host, empty slots left out; what happened in no time leaves no bar."""
    spans: list[Span] = []
    for slot in dict.fromkeys(change.slot for change in changes):
        own = [change for change in changes if change.slot == slot]
        ends = [*(change.at for change in own[1:]), steps]
        spans += [
            Span(slot, change.target, change.at, end)
            for change, end in zip(own, ends, strict=True)
            if change.target is not SeedStage.DORMANT and end > change.at
        ]
    return spans


def marks_of(changes: Sequence[StageEvent]) -> list[StageEvent]:
    """Births, commits and cuts of one host. What a panic puts back is none of them: the panic has its own line."""
    return [change for change in changes if change.target in MARKS and change.cause != "panic"]


def choose_hosts(episodes: Sequence[Episode], count: int) -> list[tuple[int, Episode]]:
    """(rank from 0, episode) of `count` hosts, best first: the best, the median, the worst, then those between."""
    ranked = ranking(episodes)
    ranks = dict.fromkeys(rank_at(share, len(ranked)) for share in STANDINGS.values())
    parts = 2
    while len(ranks) < min(count, len(ranked)):
        parts *= 2
        ranks |= dict.fromkeys(rank_at(odd / parts, len(ranked)) for odd in range(1, parts, 2))
    return [(rank, ranked[rank]) for rank in sorted(list(ranks)[:count])]


def ranking(episodes: Sequence[Episode]) -> list[Episode]:
    """By objective, the best first."""
    return sorted(episodes, key=lambda episode: (-episode.objective, episode.env))


def rank_at(share: float, hosts: int) -> int:
    """The rank, from 0, at a share of the way from the best to the worst."""
    return int(share * (hosts - 1) + 0.5)


def episode_at(episodes: Sequence[Episode], host: Standing) -> Episode:
    """The best, median or worst by objective."""
    if host not in STANDINGS:
        raise UnknownNameError("host", host, STANDINGS)
    return ranking(episodes)[rank_at(STANDINGS[host], len(episodes))]


def draw_host(run: RunState, episode: Episode, *, title: str = "", with_legend: bool = False) -> "Figure":
    """Accuracy above, one lane per slot below."""
    changes = [change for change in run.changes if change.env == episode.env]
    slots = run.slots or ["no seeds"]
    lanes = 0.46 * len(slots)
    with new_figure(10.0, lanes + 0.6 + 2.0 + 0.25 * bool(title) + 0.65 * with_legend) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.0, lanes))
        _draw_accuracy(above, episode.accuracies, episode.control_accuracies)
        draw_lanes(below, slots, changes, run.steps, episode.alphas)
        for panic in (panic for panic in run.panics if panic.env == episode.env):
            for axis in (above, below):
                axis.axvline(panic.step + 1, color=VERMILION, linestyle=(0, (2, 2)), linewidth=1.4)
        below.set(xlabel="steps trained", xlim=(0, run.steps))
        whole_ticks(below)
        above.set_title(title)
        if with_legend:
            _draw_legend(figure, alphas=bool(episode.alphas), panics=bool(run.panics))
    return figure


def _draw_accuracy(axis: "Axes", accuracies: Sequence[float], control: Sequence[float]) -> None:
    after = range(1, len(accuracies) + 1)
    axis.plot(after, accuracies, color=BLUE, marker="o", markersize=3, label="host")
    axis.plot(after, control, color=MUTED, marker="s", markersize=2.5, linestyle="--", label="its control")
    axis.fill_between(after, accuracies, control, color=BLUE, alpha=0.12, linewidth=0)
    axis.set(ylabel="accuracy (%)")
    axis.grid(axis="y")
    axis.legend(loc="upper left", bbox_to_anchor=(1.005, 1), borderaxespad=0)
    axis.tick_params(labelbottom=False)


def draw_lanes(
    axis: "Axes", slots: list[str], changes: list[StageEvent], steps: int, alphas: Mapping[str, Sequence[float]]
) -> None:
    """One lane per slot: bars of stages, marks of births, commits and cuts, and alpha."""
    lane = {slot: index for index, slot in enumerate(reversed(slots))}
    for span in spans_of(changes, steps):
        extent = [(span.begin, span.end - span.begin)]
        axis.broken_barh(extent, (lane[span.slot], _BAR), facecolor=STAGES[span.stage], linewidth=0)
    for mark in marks_of(changes):
        if mark.target is SeedStage.GERMINATED:
            name, above = mark.blueprint or "unnamed", lane[mark.slot] + _BAR + 0.05
            axis.text(mark.at + 0.012 * steps, above, name, fontsize=7.5, va="bottom")
    for stage, (name, symbol) in MARKS.items():
        if marks := [mark for mark in marks_of(changes) if mark.target is stage]:
            rise, size, colour, rim = (0.18, 6, INK, 0.0) if name == "birth" else (-_BAR / 2, 9, ON_BARS, 0.9)
            axis.plot(
                [mark.at for mark in marks], [lane[mark.slot] + _BAR + rise for mark in marks], symbol, clip_on=False,
                markersize=size, color=colour, markeredgecolor=AROUND, markeredgewidth=rim, zorder=5,
            )  # fmt: skip
    # Alpha inside the bar, whose lower edge is 0 and upper edge 1; constant within a step.
    for slot, values in alphas.items():
        edges = [at for step in range(len(values)) for at in (step, step + 1)]
        heights = [lane[slot] + _BAR * alpha if alpha > 0 else None for alpha in values for _ in (0, 1)]
        for width, colour in ((3.4, AROUND), (1.5, ON_BARS)):
            axis.plot(edges, gaps(heights), color=colour, linewidth=width, solid_capstyle="butt", zorder=4)
    axis.set_yticks([lane[slot] + _BAR / 2 for slot in slots], slots)
    axis.set(ylim=(-0.08, len(slots) + 0.05))
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")


def _draw_legend(figure: "Figure", *, alphas: bool, panics: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(color=colour, label=stage.name.lower()) for stage, colour in STAGES.items()]
    if alphas:
        handles.append(Line2D([], [], color=ON_BARS, linewidth=1.5, label="alpha, 0 to 1 inside its bar"))
    handles += [
        Line2D([], [], linestyle="none", marker=symbol, color=ON_BARS, markersize=7, label=name)
        for name, symbol in MARKS.values()
    ]
    if panics:
        handles.append(Line2D([], [], color=VERMILION, linestyle="--", label="panic: taken back"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7)


def draw_growth(run_path: Path, out_png: Path, *, host: Standing = "median", round: int | None = None) -> None:
    """One timeline as a PNG of 1200 pixels: the best, median or worst host of a round (default: of the last)."""
    run = read_run(Path(run_path), round)
    episode = episode_at(run.episodes[run.shown], host)
    title = f"{run.config['task']}, round {run.shown}: the {host} of {len(run.episodes[run.shown])} hosts"
    replace_file(Path(out_png), to_png(draw_host(run, episode, title=title, with_legend=True), 1200))
