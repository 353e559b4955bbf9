"""What `esper evaluate --json` wrote: policies on the same unseen hosts, and their differences."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from esper.karn.fields import Fields, is_number, read_object
from esper.leyline import BadValueError
from esper.leyline.numbers import t_quantile

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
    found = [_evaluation(path, tasks.inside(name)) for name in tasks.content]
    if not found:
        raise BadValueError(f"{path} is no evaluation: its 'tasks' are empty")
    differences = _differences(content.inside("mean")) if "mean" in content else []
    return [*found, Evaluation(path, MEAN, found[0].hosts, found[0].final, [], differences)]


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
    found = entry.inside("difference")

    def optional(fields: Fields, key: str) -> float | None:
        value = fields.content.get(key)
        return float(value) if is_number(value) else None

    seeds = optional(found, "seeds")
    return DifferenceFigures(
        entry.text("policy"),
        entry.text("against"),
        found.number("mean"),
        optional(found, "low"),
        optional(found, "high"),
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
