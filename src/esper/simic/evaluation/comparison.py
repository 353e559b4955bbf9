"""`esper evaluate`: policies on the same unseen hosts, compared host by host."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import numpy as np

from esper.leyline import BadValueError, objective
from esper.leyline.numbers import require_positive
from esper.leyline.progress import progress_bar
from esper.leyline.records import Json, encode
from esper.simic.distributed import World
from esper.simic.distributed.world import this_code
from esper.simic.evaluation.cache import ResultCache
from esper.simic.evaluation.dealing import check_found, run_dealt
from esper.simic.evaluation.final_log import sign_policies
from esper.simic.evaluation.policies import (
    ORACLE,
    TOLD,
    Contender,
    EvaluationConfig,
    PolicySpec,
    check_specs,
    learned_runs,
    unfinished,
)
from esper.simic.evaluation.recording import EvaluationRecords
from esper.simic.evaluation.results import Result, overall_mean
from esper.simic.evaluation.statistics import MARGIN, Claim, Rows, compare_all, compare_rows
from esper.simic.evaluation.workers import host_seeds, run_contenders
from esper.tolaria import Task, get_task
from esper.tolaria.data import data_digest
from esper.tolaria.gains import published_gains

LEAST_WORTH = 1.0  # points over its rent that the best seed must add for its slot to be called right


@dataclass(frozen=True)
class KindSummary:
    """One policy on the hosts of one kind; means over hosts and training seeds."""

    hosts: int
    objective: float
    gain: float  # accuracy minus the control's, points
    added_share: float  # added parameters over the host's
    commits: float  # fossils per host
    slots: dict[str, float]  # share of the commits by slot; empty if nothing was committed
    right_slot: str | None  # where one seed was measured to add most; None if none is worth its rent or was measured
    right_slot_share: float | None  # share of the commits there; None without a right slot or without commits


def right_slot(task: Task, kind: str) -> str | None:
    """The slot of the best seed within the parameter budget, by published gain minus rent."""
    size = task.size_of_kind(kind)
    revived = {slot: task.size_of_kind(kind, (slot,)) - size for slot in task.slot_ids}
    worth = {
        (gain.slot_id, gain.blueprint): objective(gain.points, gain.parameters + revived[gain.slot_id], size)
        for gains in published_gains(task.name)
        if gains.defect == kind
        for gain in gains.gains
        if gain.parameters <= task.parameter_budget
    }
    best = max(worth, key=lambda cell: worth[cell], default=None)
    return None if best is None or worth[best] < LEAST_WORTH else best[0]


def kinds_of_hosts(config: EvaluationConfig, policies: dict[str, list[Result]]) -> dict[str, dict[str, KindSummary]]:
    """Summaries by policy and kind of host; empty if all hosts are of one kind."""
    task, seeds = get_task(config.task), host_seeds(config)
    return {name: by_kind(task, seeds, rows) for name, rows in policies.items()} if len(task.defects) > 1 else {}


def by_kind(task: Task, seeds: Sequence[int], results: Sequence[Result]) -> dict[str, KindSummary]:
    """Summarise a policy's results (one per training seed) by kind, for kinds that have a host."""
    kinds = [task.defect_of(seed) for seed in seeds]
    hosts = {kind: [host for host, its in enumerate(kinds) if its == kind] for kind in task.defects}
    return {kind: _summary(task, kind, members, results) for kind, members in hosts.items() if members}


def _summary(task: Task, kind: str, hosts: list[int], results: Sequence[Result]) -> KindSummary:
    fossils = Counter(fossil.slot_id for result in results for host in hosts for fossil in result.fossils[host])
    total, right = fossils.total(), right_slot(task, kind)

    def mean(name: str) -> float:
        return fmean(getattr(result, name)[host] for result in results for host in hosts)

    return KindSummary(
        hosts=len(hosts),
        objective=mean("objective"),
        gain=fmean(gains[host] for gains in (result.gains(task) for result in results) for host in hosts),
        added_share=fmean(result.added_params[host] / result.sizes(task)[host] for result in results for host in hosts),
        commits=total / (len(hosts) * len(results)),
        slots={slot_id: fossils[slot_id] / total for slot_id in task.slot_ids} if total else {},
        right_slot=right,
        right_slot_share=None if right is None or not total else fossils[right] / total,
    )


@dataclass(frozen=True)
class TaskComparison:
    """All results on one task."""

    config: EvaluationConfig
    policies: dict[str, list[Result]]  # by name, one result per training or search seed; other rules have one
    claims: list[Claim]
    greedy: dict[str, list[Result]] = field(default_factory=dict)  # learned policies with their likeliest action
    kinds: dict[str, dict[str, KindSummary]] = field(default_factory=dict)  # empty if all hosts are of one kind
    warnings: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Task, hosts, and which images."""
        return f"{self.config.task}, {self.config.hosts} hosts, {'test' if self.config.final else 'validation'} images"

    def share_of_oracle(self, name: str) -> float | None:
        """Mean objective over the oracle's; None without an oracle, or if the oracle gains nothing."""
        return self._share(name, ORACLE)

    def share_of_told(self, name: str) -> float | None:
        """Mean objective over that of the first `told`; None without one, or if it gains nothing."""
        return self._share(name, TOLD)

    def _share(self, name: str, kind: str) -> float | None:
        yardstick = next((each for each in self.policies if PolicySpec.parse(each).kind == kind), None)
        best = 0.0 if yardstick is None else overall_mean(self.policies[yardstick], "objective")
        return overall_mean(self.policies[name], "objective") / best if best > 0 else None

    def to_json(self) -> dict[str, Json]:
        """Means over training seeds per host, and each seed beside them."""
        policies = {
            name: {
                **_merged(results),
                "by_kind": encode(self.kinds.get(name, {})),
                "share_of_oracle": self.share_of_oracle(name),
                "share_of_told": self.share_of_told(name),
                "greedy": _merged(self.greedy[name]) if name in self.greedy else None,
            }
            for name, results in self.policies.items()
        }
        return {
            **{name: getattr(self.config, name) for name in ("task", "hosts", "seed", "final")},
            "policies": policies,
            "differences": encode(self.claims),
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class EvaluationReport:
    """Several tasks, and the mean over them."""

    tasks: dict[str, TaskComparison]
    claims: list[Claim]  # unit = the training seed: per seed the mean over tasks of the mean over hosts
    warnings: list[str]

    def objectives(self) -> dict[str, list[float]]:
        """By policy and training seed: the mean over tasks."""
        return {name: [fmean(row) for row in rows] for name, rows in _over_tasks(self.tasks).items()}

    def to_json(self) -> dict[str, Json]:
        """One task alone; several under `tasks`, with their `mean`."""
        if len(self.tasks) == 1:
            return next(iter(self.tasks.values())).to_json()
        mean = {name: {"objective": fmean(seeds), "by_seed": seeds} for name, seeds in self.objectives().items()}
        return {
            "tasks": {name: comparison.to_json() for name, comparison in self.tasks.items()},
            "mean": {"policies": mean, "differences": encode(self.claims)},
            "warnings": self.warnings,
        }


def _merged(results: Sequence[Result]) -> dict[str, Json]:
    """Means over training seeds, in lists over hosts; commits are counts per host."""
    commits = Counter(name for result in results for names in result.commits for name in names)
    episodes = sum(len(result.objective) for result in results)
    return {
        **{name: _mean([getattr(result, name) for result in results]) for name in _LISTS},
        "objective_at": {rho: _mean([each.objective_at[rho] for each in results]) for rho in results[0].objective_at},
        "cost_by_pass": {name: fmean(v for each in results for v in each.work[name]) for name in results[0].work},
        "commits": {name: number / episodes for name, number in commits.most_common()},
        "by_seed": [{name: getattr(each, name) for name in (*_LISTS, "objective_at", "commits")} for each in results],
    }


_LISTS = ("objective", "accuracy", "control_accuracy", "added_params", "cost")


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return list(map(float, np.mean(rows, 0)))


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
    record: Path | None = None,
    world: World | None = None,
) -> EvaluationReport:
    """Evaluate policies on several tasks. `config` gives the hosts; its task is ignored. `keep`: folder of the cache.

    A final evaluation is signed into the run folders before it begins. `record`: folder for records of all episodes;
    yardsticks have none. All ranks of a world call this, and all get the report; rank 0 writes."""
    world = world or World()
    if len(set(tasks)) != len(tasks) or not tasks:
        raise BadValueError(f"tasks {list(tasks)} must be different ones, at least one")
    require_positive("margin", margin, remark=": points by which a policy may be worse")
    policies = [PolicySpec.parse(spec) for spec in specs]
    configs = [replace(config, task=task) for task in tasks]
    tuned = [file for spec in policies for task in tasks for file in spec.tuned_files(get_task(task))]
    check_found(world, [*learned_runs(policies), *tuned])
    for each in configs:
        check_specs(policies, each)
    if record is not None and config.final:
        raise BadValueError("--final scores on test images, from which nothing may be learned; omit --record")
    if world.size > 1:
        world.agree(agreed_evaluation(configs, policies, greedy=greedy))
        configs = [replace(each, device=world.device(each.device)) for each in configs]
    leads = world.rank == 0
    cache = None if keep is None or not leads else ResultCache(keep)
    records = None if record is None or not leads else EvaluationRecords(record, resumed=keep is not None)
    warnings = unfinished(learned_runs(policies))
    if config.final and leads:
        for each in configs:
            get_task(each.task).load_data(each.data_dir)  # missing data must not cost the first look
        warnings += sign_policies(policies, tasks, config.hosts, config.seed, resumed=keep is not None)
    entries = [Contender(each, spec) for each in configs for spec in policies]
    entries += [Contender(each, spec, True) for each in configs for spec in policies if greedy and spec.learned]
    total = sum(len((entry.spec.base or entry.spec).members) for entry in entries) * config.hosts
    results: dict[Contender, list[Result]] = {}
    with (
        progress_bar("evaluating", total, shown=progress and leads) as advance,
        run_dealt(world, workers, record) as (run_all, own),
    ):
        if own is not None and not leads:
            records = EvaluationRecords(own, resumed=False)
        for controls in (False, True):  # controls start from the results of the others
            stage = [entry for entry in entries if (entry.spec.base is not None) == controls]
            groups = {entry: _by_seed(entry, results) for entry in stage}
            everyone = [contender for group in groups.values() for contender in group]
            done = iter(run_contenders(everyone, run_all, advance, cache, records, world, workers))
            results |= {entry: [next(done) for _ in group] for entry, group in groups.items()}
    compared = {}
    for each in configs:
        sampled = {spec.text: results[Contender(each, spec)] for spec in policies}
        likeliest = {one.spec.text: rows for one, rows in results.items() if one.config == each and one.greedy}
        claims, kinds = compare_all(sampled, margin), kinds_of_hosts(each, sampled)
        compared[each.task] = TaskComparison(each, sampled, claims, likeliest, kinds, warnings)
    mean = compare_rows(_over_tasks(compared), margin) if len(tasks) > 1 else []
    return EvaluationReport(compared, mean, warnings)


def agreed_evaluation(
    configs: Sequence[EvaluationConfig], policies: Sequence[PolicySpec], *, greedy: bool
) -> dict[str, Json]:
    """What must be equal on all ranks: settings, code, data and the policies' files."""
    tasks = [get_task(each.task) for each in configs]
    return {
        "settings": [encode(replace(each, data_dir=None)) for each in configs],
        "greedy": greedy,
        "policies": {
            spec.text: [sha256(path.read_bytes()).hexdigest()[:16] for task in tasks for path in spec.files(task)]
            for spec in policies
        },
        "data": {
            task.name: data_digest(task.load_data(each.data_dir)) for task, each in zip(tasks, configs, strict=True)
        },
        **this_code(),
    }


def _by_seed(entry: Contender, results: Mapping[Contender, list[Result]]) -> list[Contender]:
    if entry.spec.base is None:
        return [replace(entry, spec=member) for member in entry.spec.members]
    return [replace(entry, base=result) for result in results[replace(entry, spec=entry.spec.base)]]


def _over_tasks(tasks: dict[str, TaskComparison]) -> Rows:
    """Average host i of every task, so that the mean over hosts is the mean over tasks."""
    compared = list(tasks.values())
    return {
        name: [
            _mean([one.policies[name][seed].objective for one in compared])
            for seed in range(len(compared[0].policies[name]))
        ]
        for name in compared[0].policies
    }
