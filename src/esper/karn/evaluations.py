"""What `esper evaluate --json` wrote: policies on the same unseen hosts, and their differences."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from esper.karn import colours
from esper.karn.canvas import new_figure, style, to_svg
from esper.karn.fields import Fields, is_number, read_object
from esper.karn.page import Markup, element, picture, table
from esper.leyline import BadValueError
from esper.leyline.numbers import t_quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MEAN = "mean over tasks"


class Interval(NamedTuple):
    """A mean and where it may lie, 95 %; None where one value says nothing about that."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PolicyFigures:
    """One policy; lists over hosts, means over training seeds where there are several."""

    name: str
    objective: list[float]
    accuracy: list[float]
    added_params: list[float]
    gain: list[float] | None
    """Accuracy minus the control's; None where the file does not have the control's"""
    seeds: list[tuple[float, float]]
    """(added parameters, gain) of every training seed, means over hosts; empty where there is one"""
    training_seeds: int


class DifferenceFigures(NamedTuple):
    """One policy against another."""

    policy: str
    against: str
    mean: float
    low: float | None
    high: float | None
    adjusted_p: float | None
    seeds: int | None
    superior: bool
    not_worse: float | None
    """By how many points at most, where that was shown"""


@dataclass(frozen=True)
class Evaluation:
    """One task of a file."""

    path: Path
    task: str
    hosts: int
    final: bool
    policies: list[PolicyFigures]
    """Empty in the mean over tasks, which has differences only"""
    differences: list[DifferenceFigures]


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read and check one file: one evaluation per task, and of several tasks their mean as the last.

    Keys that it has beyond those that are needed are left alone.
    """
    content = read_object(path, "evaluation (as `esper evaluate --json` writes it)")
    if "tasks" not in content:
        return [_evaluation(path, content)]
    tasks = content.inside("tasks")
    evaluations = [_evaluation(path, tasks.inside(name)) for name in tasks.content]
    if not evaluations:
        raise BadValueError(f"{path} is no evaluation: its 'tasks' are empty")
    differences = _differences(content.inside("mean")) if "mean" in content else []
    return [*evaluations, Evaluation(path, MEAN, evaluations[0].hosts, evaluations[0].final, [], differences)]


def _evaluation(path: Path, content: Fields) -> Evaluation:
    if not isinstance(content.content.get("policies"), dict) or not content.content["policies"]:
        raise BadValueError(
            f"{content.where} is no evaluation: it has no 'policies'; `esper evaluate --json` writes one"
        )
    inner = content.inside("policies")
    policies = [_policy(name, inner.inside(name)) for name in inner.content]
    hosts = {len(policy.objective) for policy in policies}
    if len(hosts) != 1:
        raise BadValueError(f"{content.where} has policies on {sorted(hosts)} hosts; they must be the same hosts")
    final = content.content.get("final") is True
    return Evaluation(path, content.text("task"), hosts.pop(), final, policies, _differences(content))


def _policy(name: str, figures: Fields) -> PolicyFigures:
    objective, accuracy, added = (figures.numbers(key) for key in ("objective", "accuracy", "added_params"))
    if not objective or not len(objective) == len(accuracy) == len(added):
        raise BadValueError(f"{figures.where}: objective, accuracy and added_params are not lists over the same hosts")
    control = figures.optional_numbers("control_accuracy")
    if control is not None and len(control) != len(accuracy):
        raise BadValueError(f"{figures.where}: {len(control)} accuracies of controls for {len(accuracy)} hosts")
    by_seed = figures.objects("by_seed")
    several = by_seed if len(by_seed) > 1 else []
    seeds = [
        (
            statistics.fmean(seed.numbers("added_params")),
            statistics.fmean(seed.numbers("accuracy")) - (statistics.fmean(control) if control else 0.0),
        )
        for seed in several
    ]
    gain = None if control is None else [a - c for a, c in zip(accuracy, control, strict=True)]
    return PolicyFigures(name, objective, accuracy, added, gain, seeds, max(1, len(by_seed)))


def _differences(content: Fields) -> list[DifferenceFigures]:
    return [_difference(entry) for entry in content.objects("differences")]


def _difference(entry: Fields) -> DifferenceFigures:
    difference = entry.inside("difference")

    def optional(fields: Fields, key: str) -> float | None:
        value = fields.content.get(key)
        return float(value) if is_number(value) else None

    seeds = optional(difference, "seeds")
    return DifferenceFigures(
        entry.text("policy"),
        entry.text("against"),
        difference.number("mean"),
        optional(difference, "low"),
        optional(difference, "high"),
        optional(entry, "adjusted_p"),
        None if seeds is None else int(seeds),
        entry.content.get("superior") is True,
        optional(entry, "margin") if entry.content.get("not_worse") is True else None,
    )


def mean_interval(values: list[float]) -> Interval:
    """The mean of values and its 95 % t-interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


# -- on the page ------------------------------------------------------------------------------------------------------

CLAIM_SEEDS = 5
"""Training seeds below which a difference is a report and no claim"""
_MARKERS = "osD^vPX*"
_LONGEST_NAME = 30


def evaluation_section(evaluation: Evaluation, name: str) -> list[Markup]:
    """An evaluation for the page: picture, figures, differences; `name` is that of the picture."""
    parts = [element("h3", f"{evaluation.task}, {evaluation.path.name}")]
    if evaluation.policies:
        parts += [_picture(evaluation, name), _policy_table(evaluation)]
    if evaluation.differences:
        parts.append(_difference_table(evaluation))
    return parts


def _picture(evaluation: Evaluation, name: str) -> Markup:
    images = "test" if evaluation.final else "validation"
    vertical = "gain over the control" if has_gain(evaluation) else "accuracy (the file lacks that of the controls)"
    seeds = (
        "; open diamonds are the means of single training seeds" if any(p.seeds for p in evaluation.policies) else ""
    )
    caption = (
        f"{evaluation.task}, {evaluation.hosts} unseen hosts, the same for every policy, {images} images: {vertical}"
        " against added parameters. A faint point is a host, a large one the mean with its 95 % interval over hosts"
        f"{seeds}."
    )
    return picture(name, to_svg(draw_evaluation(evaluation), name), caption)


def _policy_table(evaluation: Evaluation) -> Markup:
    return table(
        ("policy", "objective (points)", "accuracy (%)", "added parameters", "training seeds"),
        [_policy_row(policy) for policy in evaluation.policies],
        f"Means over {evaluation.hosts} hosts with 95 % intervals over hosts; objective = gain − rent.",
    )


def _difference_table(evaluation: Evaluation) -> Markup:
    rows = [
        (
            f"{entry.policy} − {entry.against}",
            f"{entry.mean:+.2f}",
            "–" if entry.low is None or entry.high is None else f"{entry.low:+.2f} to {entry.high:+.2f}",
            "–" if entry.adjusted_p is None else f"{entry.adjusted_p:.3g}",
            "–" if entry.seeds is None else str(entry.seeds),
            _verdict(entry),
        )
        for entry in evaluation.differences
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


def draw_evaluation(evaluation: Evaluation) -> "Figure":
    """A point per host, and per policy the mean with its interval both ways; training seeds as small open diamonds."""
    gain = has_gain(evaluation)
    with style():
        figure = new_figure(10.0, 4.6)
        axis = figure.subplots()
        for index, policy in enumerate(evaluation.policies):
            _draw_policy(axis, policy, gain, index)
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


def _draw_policy(axis: "Axes", policy: PolicyFigures, gain: bool, index: int) -> None:
    colour = colours.SERIES[index % len(colours.SERIES)].light
    marker = _MARKERS[index % len(_MARKERS)]
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
