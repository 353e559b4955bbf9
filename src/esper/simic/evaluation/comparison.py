"""`esper evaluate`: named policies on the same unseen hosts, paired and crossed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from esper.leyline import RHO, BadValueError, objective
from esper.leyline.progress import progress_bar
from esper.leyline.records import Json, encode
from esper.simic.evaluation.cache import ResultCache
from esper.simic.evaluation.final_log import sign_policies
from esper.simic.evaluation.policies import unfinished
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import MARGIN, Claim, Rows, compare_all, compare_rows
from esper.simic.evaluation.unseen import host_seeds
from esper.simic.evaluation.workers import (
    ORACLE,
    Contender,
    EvaluationConfig,
    Run,
    base_of,
    check_specs,
    is_learned,
    job_runner,
    learned_runs,
    members,
    run_everything,
)
from esper.tolaria import Task, get_task
from esper.tolaria.tasks import published_gains

LEAST_WORTH = 1.0
"""Points over its rent that the best seed must add for its slot to be called right."""


@dataclass(frozen=True)
class KindSummary:
    """One policy on the hosts of one kind; means over hosts and training seeds."""

    hosts: int
    objective: float
    gain: float
    """Accuracy minus the control's, points"""
    added_share: float
    """Added parameters over the host's"""
    commits: float
    """Fossils per host"""
    slots: dict[str, float]
    """Share of the commits by slot; empty where nothing was committed"""
    right_slot: str | None
    """Where one seed was measured to add most; None where no seed is worth its rent, or nothing was measured"""
    right_slot_share: float | None
    """Share of the commits there; None without a right slot or without commits"""


def right_slot(task: Task, kind: str, rho: float = RHO) -> str | None:
    """The slot of the best seed that the budget pays for, by the published gains minus rent."""
    worth = {
        (gain.slot_id, gain.blueprint): objective(gain.points, gain.parameters, task.host_parameters, rho)
        for gains in published_gains(task.name)
        if gains.defect == kind
        for gain in gains.gains
        if gain.parameters <= task.parameter_budget
    }
    if not worth or max(worth.values()) < LEAST_WORTH:
        return None
    return max(worth, key=lambda cell: worth[cell])[0]


def by_kind(task: Task, seeds: Sequence[int], results: Sequence[Result]) -> dict[str, KindSummary]:
    """A policy's results (one per training seed) by kind, in the order of the task; only kinds that have a host."""
    kinds = [task.defect_of(seed) for seed in seeds]
    members = {kind: [number for number, of in enumerate(kinds) if of == kind] for kind in task.defects}
    return {kind: _summary(task, kind, numbers, results) for kind, numbers in members.items() if numbers}


def _summary(task: Task, kind: str, numbers: list[int], results: Sequence[Result]) -> KindSummary:
    fossils = Counter(fossil.slot_id for result in results for number in numbers for fossil in result.fossils[number])
    total, right = fossils.total(), right_slot(task, kind)

    def mean(name: str) -> float:
        return fmean(getattr(result, name)[number] for result in results for number in numbers)

    return KindSummary(
        hosts=len(numbers),
        objective=mean("objective"),
        gain=mean("gain"),
        added_share=mean("added_params") / task.host_parameters,
        commits=total / (len(numbers) * len(results)),
        slots={slot_id: fossils[slot_id] / total for slot_id in task.slot_ids} if total else {},
        right_slot=right,
        right_slot_share=None if right is None or not total else fossils[right] / total,
    )


@dataclass(frozen=True)
class TaskComparison:
    """Everything that was found on one task."""

    task: str
    hosts: int
    seed: int
    final: bool
    policies: dict[str, list[Result]]
    """By name, one result per training seed; rules have one"""
    compared: list[Claim]
    greedy: dict[str, list[Result]] = field(default_factory=dict)
    """Learned policies with the likeliest action instead of a sampled one"""
    kinds: dict[str, dict[str, KindSummary]] = field(default_factory=dict)
    """By policy and kind of host; empty where all hosts are of one kind"""
    warnings: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Task, hosts, and which images."""
        return f"{self.task}, {self.hosts} hosts, {'test' if self.final else 'validation'} images"

    def share_of_oracle(self, name: str) -> float | None:
        """Mean objective over the oracle's; None without an oracle, or where it gains nothing."""
        if ORACLE not in self.policies:
            return None
        best = _mean_objective(self.policies[ORACLE])
        return _mean_objective(self.policies[name]) / best if best > 0 else None

    def to_json(self) -> dict[str, Json]:
        """Means over training seeds per host, and each seed beside them."""
        policies = {}
        for name, results in self.policies.items():
            policies[name] = {
                **_merged(results),
                "by_kind": encode(self.kinds.get(name, {})),
                "share_of_oracle": self.share_of_oracle(name),
                "greedy": _merged(self.greedy[name]) if name in self.greedy else None,
            }
        return {
            "task": self.task,
            "hosts": self.hosts,
            "seed": self.seed,
            "final": self.final,
            "policies": policies,
            "differences": encode(self.compared),
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class EvaluationReport:
    """Several tasks, and the mean over them."""

    tasks: dict[str, TaskComparison]
    compared: list[Claim]
    """Unit = the training seed: per seed the mean over tasks of the mean over hosts"""
    warnings: list[str]

    def objectives(self) -> dict[str, list[float]]:
        """By policy and training seed: the mean over tasks."""
        return {name: [fmean(row) for row in rows] for name, rows in _over_tasks(self.tasks).items()}

    def to_json(self) -> dict[str, Json]:
        """One task as it is; several under `tasks`, with the `mean` beside them."""
        if len(self.tasks) == 1:
            return next(iter(self.tasks.values())).to_json()
        mean = {name: {"objective": fmean(seeds), "by_seed": seeds} for name, seeds in self.objectives().items()}
        return {
            "tasks": {name: found.to_json() for name, found in self.tasks.items()},
            "mean": {"policies": mean, "differences": encode(self.compared)},
            "warnings": self.warnings,
        }


def _mean_objective(results: Sequence[Result]) -> float:
    return fmean(value for result in results for value in result.objective)


def _merged(results: Sequence[Result]) -> dict[str, Json]:
    """Lists over hosts are means over training seeds; commits are numbers per host."""
    commits = Counter(name for result in results for names in result.commits for name in names)
    episodes = sum(len(result.objective) for result in results)
    return {
        **{name: _mean([getattr(result, name) for result in results]) for name in _LISTS},
        "objective_at": {
            rho: _mean([result.objective_at[rho] for result in results]) for rho in results[0].objective_at
        },
        "cost_by_pass": {
            name: fmean(value for result in results for value in result.work[name]) for name in results[0].work
        },
        "commits": {name: number / episodes for name, number in commits.most_common()},
        "by_seed": [
            {name: getattr(result, name) for name in (*_LISTS, "objective_at", "commits")} for result in results
        ],
    }


_LISTS = ("objective", "accuracy", "control_accuracy", "added_params", "cost")


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    means: list[float] = np.mean(rows, 0).tolist()
    return means


def run_comparison(
    task_name: str,
    specs: list[str],
    hosts: int,
    rng_seed: int,
    *,
    final: bool = False,
    preset: str = "core",
    data_dir: Path | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> TaskComparison:
    """Evaluate policies given by name on one task, in this process: see `run_comparisons`."""
    config = EvaluationConfig(task_name, hosts, rng_seed, preset, final, device=device, data_dir=data_dir)
    return run_comparisons([task_name], specs, config, progress=progress).tasks[task_name]


def run_comparisons(
    tasks: Sequence[str],
    specs: Sequence[str],
    config: EvaluationConfig,
    *,
    margin: float = MARGIN,
    greedy: bool = False,
    workers: int = 1,
    progress: bool = True,
    keep: Path | None = None,
) -> EvaluationReport:
    """Evaluate policies given by name on several tasks; `config` says on which hosts, its task is not looked at.

    A name is a rule, `heuristic:FILE`, `schedule:FILE`, `oracle`, run folders joined by `+`, or `retrained:POLICY` or
    `static:POLICY` of another name of the list. A final evaluation is signed into the run folders before it begins.
    What is done lies in the folder `keep`, and is taken from there the next time.
    """
    if len(set(tasks)) != len(tasks) or not tasks:
        raise BadValueError(f"tasks {list(tasks)} must be different ones, at least one")
    if not 0.0 < margin < float("inf"):
        raise BadValueError(f"margin {margin} must be positive and finite: points by which a policy may be worse")
    configs = [replace(config, task=task) for task in tasks]
    for each in configs:
        check_specs(specs, each)
    recall = ResultCache(keep).recall if keep is not None else run_everything
    warnings = unfinished(learned_runs(specs))
    if config.final:
        for each in configs:
            get_task(each.task).load_data(each.data_dir)  # where they are missing, no look is wasted
        warnings += sign_policies(specs, tasks, config.hosts, config.seed, going_on=keep is not None)
    plain = [spec for spec in specs if base_of(spec) == spec]
    grown = {
        Key(each.task, spec, likeliest): [Contender(each, member, greedy=likeliest) for member in members(spec)]
        for each in configs
        for spec in plain
        for likeliest in ((False, True) if greedy and is_learned(spec) else (False,))
    }
    controls = [(each, spec) for each in configs for spec in specs if spec not in plain]
    total = sum(map(len, grown.values())) + sum(len(grown[Key(each.task, base_of(spec))]) for each, spec in controls)
    total *= config.hosts
    with progress_bar("evaluating", total, shown=progress) as advance, job_runner(workers, advance, recall) as run:
        found = _run_all(run, grown)
        found |= _run_all(
            run,
            {
                Key(each.task, spec): [
                    Contender(each, spec, base=result) for result in found[Key(each.task, base_of(spec))]
                ]
                for each, spec in controls
            },
        )
    compared = {each.task: _on_one_task(each, specs, found, margin) for each in configs}
    mean = compare_rows(_over_tasks(compared), margin) if len(tasks) > 1 else []
    return EvaluationReport({task: replace(one, warnings=warnings) for task, one in compared.items()}, mean, warnings)


class Key(NamedTuple):
    """Whose results."""

    task: str
    spec: str
    greedy: bool = False


def _run_all(run: Run, contenders: dict[Key, list[Contender]]) -> dict[Key, list[Result]]:
    results = iter(run([one for group in contenders.values() for one in group]))
    return {key: [next(results) for _ in group] for key, group in contenders.items()}


def _on_one_task(
    config: EvaluationConfig, specs: Sequence[str], found: dict[Key, list[Result]], margin: float
) -> TaskComparison:
    task = get_task(config.task)
    results = {spec: found[Key(task.name, spec)] for spec in specs}
    seeds = host_seeds(config.hosts, config.seed, final=config.final)
    return TaskComparison(
        config.task,
        config.hosts,
        config.seed,
        config.final,
        results,
        compare_all(results, margin),
        {key.spec: rows for key, rows in found.items() if key.task == task.name and key.greedy},
        {spec: by_kind(task, seeds, rows) for spec, rows in results.items()} if len(task.defects) > 1 else {},
    )


def _over_tasks(tasks: dict[str, TaskComparison]) -> Rows:
    """Host i is the mean over tasks of their hosts i: so the mean over hosts is the mean over tasks of theirs."""
    compared = list(tasks.values())
    return {
        name: [
            _mean([one.policies[name][seed].objective for one in compared])
            for seed in range(len(compared[0].policies[name]))
        ]
        for name in compared[0].policies
    }
