"""Policies compared: gain against the parameters that it cost, host by host, and tables of both."""

import math
from typing import TYPE_CHECKING

from esper.karn import colours
from esper.karn.canvas import new_figure, style, to_svg
from esper.karn.evaluations import DifferenceFigures, Evaluation, Interval, PolicyFigures, mean_interval
from esper.karn.page import Markup, element, picture, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLAIM_SEEDS = 5
"""Training seeds below which a difference is a report and no claim"""
_MARKERS = "osD^vPX*"
_LONGEST_NAME = 30


def tell(found: Evaluation, name: str) -> list[Markup]:
    """An evaluation for the page: picture, figures, differences; `name` is that of the picture."""
    parts = [element("h3", f"{found.task}, {found.path.name}")]
    if found.policies:
        parts += [_picture(found, name), _policy_table(found)]
    if found.differences:
        parts.append(_difference_table(found))
    return parts


def _picture(found: Evaluation, name: str) -> Markup:
    images = "test" if found.final else "validation"
    vertical = "gain over the control" if has_gain(found) else "accuracy (the file lacks that of the controls)"
    caption = (
        f"{found.task}, {found.hosts} unseen hosts, the same for every policy, {images} images: {vertical} against"
        " added parameters. A faint point is a host, a large one the mean with its 95 % interval over hosts"
        + ("; open diamonds are the means of single training seeds." if any(p.seeds for p in found.policies) else ".")
    )
    return picture(name, to_svg(draw_policies(found), name), caption)


def _policy_table(found: Evaluation) -> Markup:
    return table(
        ("policy", "objective (points)", "accuracy (%)", "added parameters", "training seeds"),
        [_policy_row(policy) for policy in found.policies],
        f"Means over {found.hosts} hosts with 95 % intervals over hosts; objective = gain − rent.",
    )


def _difference_table(found: Evaluation) -> Markup:
    rows = [
        (
            f"{entry.policy} − {entry.against}",
            f"{entry.mean:+.2f}",
            "–" if entry.low is None or entry.high is None else f"{entry.low:+.2f} to {entry.high:+.2f}",
            "–" if entry.adjusted_p is None else f"{entry.adjusted_p:.3g}",
            "–" if entry.seeds is None else str(entry.seeds),
            _verdict(entry),
        )
        for entry in found.differences
    ]
    return table(
        ("difference in objective", "mean", "95 % interval", "adjusted p", "training seeds", "verdict"),
        rows,
        "Paired over hosts; intervals over training seeds where there are several, else over hosts.",
    )


def _policy_row(policy: PolicyFigures) -> tuple[str, ...]:
    return (
        policy.name,
        _shown(mean_interval(policy.objective), "+.2f"),
        _shown(mean_interval(policy.accuracy), ".1f"),
        _shown(mean_interval(policy.added_params), ".0f"),
        str(policy.training_seeds),
    )


def _shown(interval: Interval, form: str) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{form}}"
    return f"{interval.mean:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _verdict(entry: DifferenceFigures) -> str:
    shown = ["superior"] if entry.superior else []
    shown += [] if entry.not_worse is None else [f"not worse by {entry.not_worse:g}"]
    if not shown and entry.seeds is not None and entry.seeds < CLAIM_SEEDS:
        return "a report, no claim"
    return ", ".join(shown) or "nothing shown"


def label_of(name: str) -> str:
    """A policy's name for a picture: files and run folders by their last part, several as the first and how many."""
    kind, colon, rest = name.rpartition(":")
    parts = [part.rstrip("/").split("/")[-1] or part for part in rest.split("+")]
    short = f"{kind}{colon}{parts[0]}" + (f" + {len(parts) - 1} more" if len(parts) > 1 else "")
    return short if len(short) <= _LONGEST_NAME else f"{short[: _LONGEST_NAME - 1]}…"


def has_gain(evaluation: Evaluation) -> bool:
    """Whether the file tells what the controls reached."""
    return all(policy.gain is not None for policy in evaluation.policies)


def draw_policies(evaluation: Evaluation) -> "Figure":
    """A point per host, and per policy the mean with its interval both ways; training seeds as small open diamonds."""
    gain = has_gain(evaluation)
    with style():
        figure = new_figure(10.0, 4.6)
        axis = figure.subplots()
        for place, policy in enumerate(evaluation.policies):
            _draw_policy(axis, policy, gain, place)
        if gain:
            axis.axhline(0, color=colours.MUTED.light, linewidth=0.8, linestyle=":")
        widest = max(max(policy.added_params) for policy in evaluation.policies)
        if widest > 0:
            # Most policies add little and some a lot: the root gives both room, and has a zero.
            axis.set_xscale("function", functions=(_root, _square))
            axis.set_xticks(_root_ticks(widest))
            axis.set_xlim(-0.0006 * widest, 1.06 * widest)  # a little room for marks at zero
        axis.set(
            xlabel="parameters added per host (root scale)" if widest > 0 else "parameters added per host",
            ylabel="gain over the control (points)" if gain else "accuracy (%)",
        )
        axis.grid()
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, labelspacing=0.9)
    return figure


def _draw_policy(axis: "Axes", policy: PolicyFigures, gain: bool, place: int) -> None:
    colour = colours.SERIES[place % len(colours.SERIES)].light
    marker = _MARKERS[place % len(_MARKERS)]
    heights = policy.gain if gain and policy.gain is not None else policy.accuracy
    axis.plot(
        policy.added_params,
        heights,
        linestyle="none",
        marker=marker,
        markersize=5,
        color=colour,
        alpha=0.5,
        markeredgewidth=0,
    )
    across, up = mean_interval(policy.added_params), mean_interval(heights)
    axis.errorbar(
        [across.mean], [up.mean], xerr=_arms(across, floor=0.0), yerr=_arms(up), fmt=marker, color=colour,
        markersize=10, markeredgecolor=colours.INK.light, markeredgewidth=1, capsize=3, elinewidth=1.6, zorder=5,
        label=label_of(policy.name),
    )  # fmt: skip
    if policy.seeds:
        added, reached = zip(*policy.seeds, strict=True)
        axis.plot(
            added,
            reached,
            linestyle="none",
            marker="d",
            markersize=6,
            markerfacecolor="none",
            markeredgecolor=colour,
            zorder=4,
        )


def _arms(interval: Interval, floor: float | None = None) -> list[list[float]]:
    if interval.low is None or interval.high is None:
        return [[0.0], [0.0]]
    low = interval.low if floor is None else max(floor, interval.low)
    return [[interval.mean - low], [interval.high - interval.mean]]


def _root(values):  # type: ignore[no-untyped-def]  # arrays of whatever kind matplotlib hands in
    import numpy as np

    return np.sign(values) * np.sqrt(np.abs(values))


def _square(values):  # type: ignore[no-untyped-def]  # as above
    import numpy as np

    return np.sign(values) * values**2


def _root_ticks(widest: float) -> list[float]:
    """Round numbers, at least a tenth of the axis apart on the root scale."""
    ticks: list[float] = []
    power = 10 ** math.floor(math.log10(widest))
    for value in (first * power / 10**fall for fall in range(4) for first in (5, 2, 1)):
        apart = not ticks or math.sqrt(ticks[-1] / widest) - math.sqrt(value / widest) >= 0.1
        if 1 <= value <= widest and apart and math.sqrt(value / widest) >= 0.1:
            ticks.append(value)
    return [0.0, *reversed(ticks)]
