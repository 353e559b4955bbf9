"""The growth of one host over its steps: what each slot went through, and how the accuracy followed.

The horizontal axis counts steps trained. The decision of step s is taken at s, its training fills s to s + 1, and its
measurements stand at s + 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from esper.karn import colours
from esper.karn.canvas import new_figure, style, to_png, whole_ticks, write_whole
from esper.karn.panels import gaps
from esper.karn.state import Episode, RunState, StageEvent, read_run
from esper.leyline import SeedStage, UnknownNameError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Standing = Literal["best", "median", "worst"]
STANDINGS: dict[Standing, float] = {"best": 0.0, "median": 0.5, "worst": 1.0}
"""Where in the ranking by objective"""


class Span(NamedTuple):
    """A slot was in one stage for a while."""

    slot: str
    stage: SeedStage
    begin: int
    end: int
    blueprint: str | None


class Mark(NamedTuple):
    """Something happened to a seed."""

    slot: str
    kind: Literal["birth", "commit", "cut"]
    at: int


_SYMBOLS = {"birth": ("^", "birth"), "commit": ("*", "commit"), "cut": ("X", "cut")}
_MARKED: dict[SeedStage, Literal["birth", "commit", "cut"]] = {
    SeedStage.GERMINATED: "birth",
    SeedStage.FOSSILIZED: "commit",
    SeedStage.PRUNED: "cut",
}
_BAR = 0.6
"""Height of a bar in its lane; the name of the blueprint stands above it"""


def spans_of(changes: Sequence[StageEvent], steps: int) -> list[Span]:
    """Bars of one host, empty slots left out; what happened in no time leaves no bar."""
    spans: list[Span] = []
    for slot in dict.fromkeys(change.slot for change in changes):
        own = [change for change in changes if change.slot == slot]
        ends = [*(change.at for change in own[1:]), steps]
        spans += [
            Span(slot, change.target, change.at, end, change.blueprint)
            for change, end in zip(own, ends, strict=True)
            if change.target is not SeedStage.DORMANT and end > change.at
        ]
    return spans


def marks_of(changes: Sequence[StageEvent]) -> list[Mark]:
    """Births, commits and cuts of one host. What a panic puts back is none of them: the panic has its own line."""
    return [
        Mark(change.slot, _MARKED[change.target], change.at)
        for change in changes
        if change.target in _MARKED and change.cause != "panic"
    ]


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


def draw_host(run: RunState, episode: Episode, *, title: str = "", with_legend: bool = False) -> "Figure":
    """Accuracy above, one lane per slot below; without curves in the log, the lanes alone."""
    curves = episode.accuracies is not None
    changes = [change for change in run.changes if change.env == episode.env]
    slots = run.slots or ["no seeds"]
    lanes = 0.46 * len(slots)
    with style():
        figure = new_figure(10.0, lanes + 0.6 + (2.0 if curves else 0) + 0.25 * bool(title) + 0.65 * with_legend)
        if curves:
            above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.0, lanes))
            _draw_accuracy(above, episode)
        else:
            above = below = figure.subplots()
        _draw_lanes(below, slots, changes, run.steps)
        _draw_alphas(below, slots, episode)
        for panic in (panic for panic in run.panics if panic.env == episode.env):
            for axis in {above, below}:
                axis.axvline(panic.step + 1, color=colours.VERMILION.light, linestyle=(0, (2, 2)), linewidth=1.4)
        below.set(xlabel="steps trained", xlim=(0, run.steps))
        whole_ticks(below)
        above.set_title(title)
        if with_legend:
            _draw_legend(figure, alphas=bool(episode.alphas), panics=bool(run.panics))
    return figure


def _draw_accuracy(axis: "Axes", episode: Episode) -> None:
    accuracies = episode.accuracies or []
    after = range(1, len(accuracies) + 1)
    axis.plot(after, accuracies, color=colours.BLUE.light, marker="o", markersize=3, label="host")
    control = episode.control_accuracies
    if control is not None:
        axis.plot(
            after, control, color=colours.MUTED.light, marker="s", markersize=2.5, linestyle="--", label="its control"
        )
        axis.fill_between(after, accuracies, control, color=colours.BLUE.light, alpha=0.12, linewidth=0)
    axis.set(ylabel="accuracy (%)")
    axis.grid(axis="y")
    axis.legend(loc="upper left", bbox_to_anchor=(1.005, 1), borderaxespad=0)
    axis.tick_params(labelbottom=False)


def _draw_lanes(axis: "Axes", slots: list[str], changes: list[StageEvent], steps: int) -> None:
    lane = {slot: index for index, slot in enumerate(reversed(slots))}
    spans = spans_of(changes, steps)
    for span in spans:
        axis.broken_barh(
            [(span.begin, span.end - span.begin)],
            (lane[span.slot], _BAR),
            facecolor=colours.STAGES[span.stage],
            linewidth=0,
        )
    for change in changes:
        if change.target is SeedStage.GERMINATED and change.cause != "panic":
            name = change.blueprint or "unnamed"
            axis.text(change.at + 0.012 * steps, lane[change.slot] + _BAR + 0.05, name, fontsize=7.5, va="bottom")
    for kind, (symbol, _) in _SYMBOLS.items():
        there = [mark for mark in marks_of(changes) if mark.kind == kind]
        if not there:
            continue
        axis.plot(
            [mark.at for mark in there],
            [lane[mark.slot] + _BAR + (0.18 if kind == "birth" else -_BAR / 2) for mark in there],
            linestyle="none",
            marker=symbol,
            markersize=6 if kind == "birth" else 9,
            color=colours.INK.light if kind == "birth" else colours.ON_BARS,
            markeredgecolor=colours.INK.light if kind == "birth" else colours.AROUND,
            markeredgewidth=0 if kind == "birth" else 0.9,
            clip_on=False,
            zorder=5,
        )
    axis.set_yticks([lane[slot] + _BAR / 2 for slot in slots], slots)
    axis.set(ylim=(-0.08, len(slots) + 0.05))
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")


def _draw_alphas(axis: "Axes", slots: list[str], episode: Episode) -> None:
    """Inside the bar: its lower edge is 0, its upper edge 1. Constant within a step."""
    lane = {slot: index for index, slot in enumerate(reversed(slots))}
    for slot, alphas in (episode.alphas or {}).items():
        edges = [at for step in range(len(alphas)) for at in (step, step + 1)]
        heights = [lane[slot] + _BAR * alpha if alpha > 0 else None for alpha in alphas for _ in (0, 1)]
        for width, colour in ((3.4, colours.AROUND), (1.5, colours.ON_BARS)):
            axis.plot(edges, gaps(heights), color=colour, linewidth=width, solid_capstyle="butt", zorder=4)


def stage_legend() -> list[tuple[str, str]]:
    """(colour, name) of every stage."""
    return [(colour, stage.name.lower()) for stage, colour in colours.STAGES.items()]


def _draw_legend(figure: "Figure", *, alphas: bool, panics: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(color=colour, label=name) for colour, name in stage_legend()]
    if alphas:
        handles.append(Line2D([], [], color=colours.ON_BARS, linewidth=1.5, label="alpha, 0 to 1 inside its bar"))
    handles += [
        Line2D([], [], linestyle="none", marker=symbol, color=colours.ON_BARS, markersize=7, label=name)
        for symbol, name in _SYMBOLS.values()
    ]
    if panics:
        handles.append(Line2D([], [], color=colours.VERMILION.light, linestyle="--", label="panic: taken back"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7)


def draw_growth(run_path: Path, out_png: Path, *, host: Standing = "median", round: int | None = None) -> None:
    """One timeline as a PNG of 1200 pixels: the best, median or worst host of a round (default: of the last)."""
    if host not in STANDINGS:
        raise UnknownNameError("host", host, STANDINGS)
    run = read_run(Path(run_path), round)
    ranked = ranking(run.episodes[run.shown])
    episode = ranked[rank_at(STANDINGS[host], len(ranked))]
    title = f"{run.config['task']}, round {run.shown}: the {host} of {len(ranked)} hosts"
    write_whole(Path(out_png), to_png(draw_host(run, episode, title=title, with_legend=True), 1200))
