"""Results by kind of host, for tasks whose hosts draw what is wrong with them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from esper.simic.training.results import RHO, Result
from esper.tolaria import Task
from esper.tolaria.gains import published_gains

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
        (gain.slot_id, gain.blueprint): gain.points - rho * math.log2(1 + gain.parameters / task.host_parameters)
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
