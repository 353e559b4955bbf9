"""What `esper evaluate --json` wrote: policies on the same unseen hosts, and their differences."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from esper.karn.canvas import new_figure
from esper.karn.fields import Fields, read_object
from esper.karn.page import Markup, element, picture, table
from esper.karn.palette import INK, MUTED, SERIES
from esper.leyline import BadValueError
from esper.leyline.numbers import CLAIM_SEEDS, t_quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEAN = "mean over tasks"
_MARKERS = "osD^vPX*"
_LONGEST_NAME = 30


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PolicyFigures:
    """One policy; lists over hosts, means over training seeds where there are several."""

    name: str
    objective: list[float]
    accuracy: list[float]
    added_params: list[float]
    gain: list[float]
    """Accuracy minus the control's"""
    seeds: list[tuple[float, float]]
    """(added parameters, gain) of every training seed, means over hosts; empty where there is one"""
    training_seeds: int


class DifferenceFigures(NamedTuple):
    """One policy against another."""

    policy: str
    against: str
    interval: Interval
    adjusted_p: float
    seeds: int
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
    """Read and check one file: an evaluation per task, and their mean if there are several. Ignores other keys."""
    content = read_object(path, "evaluation (as `esper evaluate --json` writes it)")
    if "tasks" not in content:
        return [_evaluation(path, content)]
    tasks = content.inside("tasks")
    evaluations = [_evaluation(path, tasks.inside(name)) for name in tasks]
    if not evaluations:
        raise BadValueError(f"{path} is no evaluation: its 'tasks' are empty")
    differences = _differences(content.inside("mean")) if "mean" in content else []
    return [*evaluations, Evaluation(path, MEAN, evaluations[0].hosts, evaluations[0].final, [], differences)]


def _evaluation(path: Path, content: Fields) -> Evaluation:
    if not isinstance(content.get("policies"), dict) or not content["policies"]:
        raise BadValueError(
            f"{content.where} is no evaluation: it has no 'policies'; `esper evaluate --json` writes one"
        )
    inner = content.inside("policies")
    policies = [_policy(name, inner.inside(name)) for name in inner]
    hosts = {len(policy.objective) for policy in policies}
    if len(hosts) != 1:
        raise BadValueError(f"{content.where} has policies on {sorted(hosts)} hosts; they must be the same hosts")
    final = content.get("final") is True
    return Evaluation(path, content.text("task"), hosts.pop(), final, policies, _differences(content))


def _policy(name: str, figures: Fields) -> PolicyFigures:
    objective, accuracy, added = (figures.numbers(key) for key in ("objective", "accuracy", "added_params"))
    control = figures.numbers("control_accuracy")
    if len(objective) < 2 or not len(objective) == len(accuracy) == len(added) == len(control):
        raise BadValueError(
            f"{figures.where}: objective, accuracy, added_params and control_accuracy are not lists over the same "
            "hosts, two or more"
        )
    by_seed = figures.objects("by_seed")
    reached = statistics.fmean(control)
    seeds = [
        (statistics.fmean(seed.numbers("added_params")), statistics.fmean(seed.numbers("accuracy")) - reached)
        for seed in by_seed
        if len(by_seed) > 1
    ]
    gain = [a - c for a, c in zip(accuracy, control, strict=True)]
    return PolicyFigures(name, objective, accuracy, added, gain, seeds, max(1, len(by_seed)))


def _differences(content: Fields) -> list[DifferenceFigures]:
    return [_difference(entry, entry.inside("difference")) for entry in content.objects("differences")]


def _difference(entry: Fields, figures: Fields) -> DifferenceFigures:
    return DifferenceFigures(
        entry.text("policy"),
        entry.text("against"),
        Interval(*map(figures.number, ("mean", "low", "high"))),
        entry.number("adjusted_p"),
        figures.whole("seeds"),
        entry.get("superior") is True,
        entry.number("margin") if entry.get("not_worse") is True else None,
    )


def mean_interval(values: list[float]) -> Interval:
    """The mean of values and its 95 % t-interval."""
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


# -- on the page ------------------------------------------------------------------------------------------------------


def evaluation_section(evaluation: Evaluation, name: str) -> list[Markup]:
    """An evaluation for the page: picture, figures, differences; `name` is that of the picture."""
    parts = [element("h3", f"{evaluation.task}, {evaluation.path.name}")]
    if evaluation.policies:
        policies = table(
            ("policy", "objective (points)", "accuracy (%)", "added parameters", "training seeds"),
            [_policy_row(policy) for policy in evaluation.policies],
            f"Means over {evaluation.hosts} hosts with 95 % intervals over hosts; objective = gain − rent.",
        )
        parts += [picture(name, draw_evaluation(evaluation), _caption(evaluation)), policies]
    if evaluation.differences:
        differences = table(
            ("difference in objective", "mean", "95 % interval", "adjusted p", "training seeds", "verdict"),
            [_difference_row(entry) for entry in evaluation.differences],
            "Paired over hosts; intervals over training seeds where there are several, else over hosts.",
        )
        parts.append(differences)
    return parts


def _caption(evaluation: Evaluation) -> str:
    images = "test" if evaluation.final else "validation"
    seeds = any(policy.seeds for policy in evaluation.policies)
    return (
        f"{evaluation.task}, {evaluation.hosts} unseen hosts, the same for every policy, {images} images: gain over"
        " the control against added parameters. A faint point is a host, a large one the mean with its 95 % interval"
        f" over hosts{'; open diamonds are the means of single training seeds' if seeds else ''}."
    )


def _policy_row(policy: PolicyFigures) -> tuple[str, ...]:
    figures = ((policy.objective, "+.2f"), (policy.accuracy, ".1f"), (policy.added_params, ".0f"))
    return (policy.name, *(_shown(mean_interval(values), form) for values, form in figures), str(policy.training_seeds))


def _shown(interval: Interval, form: str) -> str:
    return f"{interval.mean:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _difference_row(entry: DifferenceFigures) -> tuple[str, ...]:
    shown = ["superior"] if entry.superior else []
    shown += [] if entry.not_worse is None else [f"not worse by {entry.not_worse:g}"]
    mean, low, high = entry.interval
    return (
        f"{entry.policy} − {entry.against}",
        f"{mean:+.2f}",
        f"{low:+.2f} to {high:+.2f}",
        f"{entry.adjusted_p:.3g}",
        str(entry.seeds),
        ", ".join(shown) or ("a report, no claim" if entry.seeds < CLAIM_SEEDS else "nothing shown"),
    )


def label_of(name: str) -> str:
    """A policy's name for a picture: files and run folders by their last part, several as the first and how many."""
    kind, colon, rest = name.rpartition(":")
    parts = [part.rstrip("/").split("/")[-1] or part for part in rest.split("+")]
    short = f"{kind}{colon}{parts[0]}" + (f" + {len(parts) - 1} more" if len(parts) > 1 else "")
    return short if len(short) <= _LONGEST_NAME else f"{short[: _LONGEST_NAME - 1]}…"


def draw_evaluation(evaluation: Evaluation) -> "Figure":
    """A point per host, and per policy the mean with its interval both ways; training seeds as small open diamonds."""
    import numpy as np

    horizontal = "parameters added per host"
    with new_figure(10.0, 4.6) as figure:
        axis = figure.subplots()
        for index, policy in enumerate(evaluation.policies):
            _draw_policy(axis, policy, SERIES[index % len(SERIES)], _MARKERS[index % len(_MARKERS)])
        axis.axhline(0, color=MUTED, linewidth=0.8, linestyle=":")
        widest = max(max(policy.added_params) for policy in evaluation.policies)
        if widest > 0:
            # Most policies add little and some a lot: the root gives both room, and has a zero.
            root_and_square = (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x**2)
            axis.set_xscale("function", functions=root_and_square)
            axis.set_xticks(_root_ticks(widest))
            axis.set_xlim(-0.0006 * widest, 1.06 * widest)  # a little room for marks at zero
            horizontal += " (root scale)"
        axis.set(xlabel=horizontal, ylabel="gain over the control (points)")
        axis.grid()
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, labelspacing=0.9)
    return figure


def _draw_policy(axis: "Axes", policy: PolicyFigures, colour: str, marker: str) -> None:
    axis.plot(policy.added_params, policy.gain, marker, markersize=5, color=colour, alpha=0.5, markeredgewidth=0)
    across, up = mean_interval(policy.added_params), mean_interval(policy.gain)
    axis.errorbar(
        [across.mean], [up.mean], xerr=_arms(across, floor=0.0), yerr=_arms(up), fmt=marker, color=colour,
        markersize=10, markeredgecolor=INK, markeredgewidth=1, capsize=3, elinewidth=1.6, zorder=5,
        label=label_of(policy.name),
    )  # fmt: skip
    if policy.seeds:
        added, reached = zip(*policy.seeds, strict=True)
        axis.plot(added, reached, "d", markersize=6, markerfacecolor="none", markeredgecolor=colour, zorder=4)


def _arms(interval: Interval, floor: float = -math.inf) -> list[list[float]]:
    return [[interval.mean - max(floor, interval.low)], [interval.high - interval.mean]]


def _root_ticks(widest: float) -> list[float]:
    """Round numbers, at least a tenth of the axis apart on the root scale."""
    ticks: list[float] = []
    power = 10 ** math.floor(math.log10(widest))
    for value in (first * power / 10**fall for fall in range(4) for first in (5, 2, 1)):
        apart = not ticks or math.sqrt(ticks[-1] / widest) - math.sqrt(value / widest) >= 0.1
        if 1 <= value <= widest and apart and math.sqrt(value / widest) >= 0.1:
            ticks.append(value)
    return [0.0, *reversed(ticks)]
