"""Coalitions of the seeds that act in one host, scored as contributions are: every row has statistics of its own, and
all see the same images. So what leave-one-out finds here is what `validate` and `measure` report.

Nothing is noted in the states of the seeds, and nothing in the host moves.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina import MorphogeneticModel
from esper.kasmina.compare import RowScore, score_row
from esper.kasmina.slot import Role
from esper.leyline import ACTIVE_STAGES
from esper.simic.rewards.attribution import Attribution, Coalition, Score, ScoreCoalition, shapley
from esper.tolaria import HostFleet
from esper.tolaria.batches import Samples
from esper.tolaria.needs import LEAST_PART
from esper.tolaria.planning import deployed_rows
from esper.tolaria.rows import Rows
from esper.tolaria.scoring import score_rows
from esper.tolaria.shortage import memory_guard


class ActingSeeds(NamedTuple):
    """The seeds that act in one host; they are scored as the host is at that moment."""

    slots: tuple[str, ...]
    """Seed i of a coalition is the one in slot i, in the host's order"""
    score: ScoreCoalition


def attribute(seeds: ActingSeeds, *, orders: int = 20, rng_seed: int = 0) -> Attribution:
    """What each of them is worth, in the order of `seeds.slots`: Shapley values.

    Exact for up to four seeds, from all their coalitions; above, from so many random orders of arrival.
    """
    return shapley(seeds.score, len(seeds.slots), orders=orders, rng_seed=rng_seed)


def seeds_of_model(model: MorphogeneticModel, x: Tensor, targets: Tensor, calibration: Tensor) -> ActingSeeds:
    """The acting seeds of a model on these images; `calibration` are training inputs, as for `model.measure`."""
    slots = tuple(slot_id for slot_id, slot in model.seed_slots.items() if slot.state.stage in ACTIVE_STAGES)

    def score(acting: Collection[str]) -> RowScore:
        roles = {slot_id: Role.SILENT for slot_id in slots if slot_id not in acting}
        with torch.compiler.set_stance("force_eager"):  # rows that run once are not worth a graph each
            return score_row(model.body, x, targets, roles, calibration)

    return ActingSeeds(slots, _by_number(slots, score))


def seeds_of_host(fleet: HostFleet, env: int, samples: Samples | None = None) -> ActingSeeds:
    """The acting seeds of one host of a fleet, on these images (default: those that `fleet.validate` scores)."""
    fleet.check_env(env)
    slots = tuple(slot_id for slot_id, state in fleet.states[env].items() if state.stage in ACTIVE_STAGES)
    samples = fleet.batches.validation() if samples is None else samples
    calibration = fleet.batches.calibration(fleet.task.calibration_size)
    # Among neighbours, whose rows are thrown away: in passes of fewer rows some kernels round differently.
    everyone = range(len(fleet.host.weights))
    first = max(0, min(env, len(everyone) - LEAST_PART))
    envs = everyone[first : first + LEAST_PART]

    def score(acting: Collection[str]) -> RowScore:
        with memory_guard(fleet, "scoring coalitions"):
            return score_rows(fleet, _rows_with(fleet, envs, acting), samples, calibration)[envs.index(env)]

    return ActingSeeds(slots, _by_number(slots, score))


def _rows_with(fleet: HostFleet, envs: Sequence[int], acting: Collection[str]) -> Rows:
    """Main rows of these envs in which only these slots act."""
    _ = fleet.plan  # settles the banks
    rows = deployed_rows(fleet, envs)
    acts = {place: [act for act in found if act.bank.slot.slot_id in acting] for place, found in rows.acts.items()}
    return replace(rows, acts=acts)


def _by_number(slots: Sequence[str], score: Callable[[Collection[str]], RowScore]) -> ScoreCoalition:
    """Slots by their number, and what pairs the errors."""

    def score_numbered(coalition: Coalition) -> Score:
        found = score([slots[seed] for seed in coalition])
        return Score(found.accuracy, found.correct)

    return score_numbered
