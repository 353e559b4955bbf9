"""The grower's own rule: spread the budget over all slots at once, keep what contributes.

In a training of fixed length the early seed wins, so nothing waits for a plateau. The budget is spread by the cheapest
upgrade: every slot starts with the smallest blueprint, and the upgrade that costs least comes first. So narrow, early
stages get large seeds, and wide stages what is left.
"""

import math
from collections.abc import Mapping

from esper.grower.records import Action, GrowthReport
from esper.leyline import SeedReport, SeedStage

LATEST = 0.6  # share of the training after which no seed is born: too little time would be left to learn
TRIAL = 1 / 6  # share of the training before a seed is judged
LEAST_STEPS = 4  # for a birth after the first and a trial of two
ENDING = 2  # in the last steps, every seed with a positive contribution is committed


def heuristic(report: GrowthReport) -> list[Action]:
    """Judge the seeds that have had their trial, and fill the slots that no seed was tried in."""
    trial = trial_of(report.steps)
    left = report.steps - report.step
    actions = [
        Action(op, slot_id, seed.blueprint or "")
        for slot_id, seed in report.slots.items()
        if (op := _judge(seed, trial, left)) is not None
    ]
    if left >= max(trial + 1, (1 - LATEST) * report.steps):
        costs = {
            slot_id: {name: offer.parameters for name, offer in report.offers[slot_id].items()}
            for slot_id, seed in report.slots.items()
            if seed.germinations == 0 and report.offers[slot_id]
        }
        births = spread(costs, report.budget_left)
        actions += [Action("germinate", slot_id, name) for slot_id, name in births.items()]
    return actions


def trial_of(steps: int) -> int:
    """Steps before a seed is judged, in a training of `steps`."""
    return max(2, math.ceil(TRIAL * steps))


def _judge(seed: SeedReport, trial: int, left: int) -> str | None:
    """Commit a seed whose contribution exceeds its error, prune one that harms; None to wait."""
    if seed.stage is not SeedStage.HOLDING or seed.contribution is None:
        return None
    if left <= ENDING and seed.contribution.value > 0:
        return "fossilize"
    if seed.steps_in_stage < trial:
        return None
    if seed.contribution.beyond_error:
        return "fossilize"
    return "prune" if seed.contribution.value < 0 else None


def spread(costs: Mapping[str, Mapping[str, int]], budget: int) -> dict[str, str]:
    """Blueprints by slot, as far as the budget goes, by cheapest upgrade. `costs` has parameters by slot and name."""
    chosen: dict[str, str] = {}
    spent = 0
    while True:
        upgrades = [
            (cost - costs[slot_id].get(chosen.get(slot_id, ""), 0), slot_id, name)
            for slot_id, offers in costs.items()
            for name, cost in offers.items()
            if cost > costs[slot_id].get(chosen.get(slot_id, ""), 0)
        ]
        affordable = [upgrade for upgrade in upgrades if spent + upgrade[0] <= budget]
        if not affordable:
            return chosen
        extra, slot_id, name = min(affordable, key=lambda upgrade: upgrade[0])
        spent, chosen[slot_id] = spent + extra, name
