"""The best open-loop plan: the best single seed first, then one more in another slot while that pays."""

from collections.abc import Sequence

from esper.leyline import BadValueError
from esper.simic.training.tuning_search import Search
from esper.tamiyo import ActionTable, Policy
from esper.tamiyo.policies import Plan, PlannedSeed, SchedulePolicy
from esper.tamiyo.policies.schedule import MAX_SEEDS
from esper.tolaria import Task

SHARES = (0.5, 0.2, 0.1)
"""Of the episodes, for plans of one, two and three seeds; the rest, and what was not needed, is the finalists'."""


def search_schedule(search: Search[Plan], task: Task) -> tuple[Plan, float]:
    """The plan with the best mean objective, and that. To wait is always among them: 0 points, and no episode."""
    plans = one_seed_plans(task)
    if not plans:
        raise BadValueError(f"task {task.name!r}: its budget of {task.parameter_budget} parameters pays for no seed")
    finalists = search.halve("one seed", plans, int(SHARES[0] * search.budget))[:2]
    best = finalists[0]
    for seeds, share in zip(range(2, MAX_SEEDS + 1), SHARES[1:], strict=True):
        longer = extensions(best, task)
        if not longer:
            break
        longest = search.halve(f"{seeds} seeds", longer, int(share * search.budget))[0]
        if search.ranked([best, longest])[0] is best:
            break
        best = longest
        finalists.append(best)
    chosen, mean = search.decide(finalists)
    return (chosen, mean) if mean > 0 else (Plan(), 0.0)


def plan_policy(task: Task, table: ActionTable, plans: Sequence[Plan]) -> Policy:
    """A policy over envs with one plan each."""
    return SchedulePolicy(table, task.slot_config, plans)


def one_seed_plans(task: Task) -> list[Plan]:
    """Slot × blueprint × germination at 0, T/4, T/2, as far as the parameter budget allows."""
    return extensions(Plan(), task)


def extensions(plan: Plan, task: Task) -> list[Plan]:
    """The plan and one more seed, in every way that the parameter budget allows."""
    taken = {seed.slot for seed in plan.seeds}
    budget = task.parameter_budget - plan_parameters(plan, task)
    times = list(dict.fromkeys((0, task.steps // 4, task.steps // 2)))
    return [
        Plan((*plan.seeds, PlannedSeed(slot.slot_id, offer.name, when)))
        for slot in task.slot_config.slots
        for offer in slot.blueprints
        for when in times
        if slot.slot_id not in taken and offer.parameters <= budget
    ]


def plan_parameters(plan: Plan, task: Task) -> int:
    """Parameters that a plan grows."""
    return sum(
        offer.parameters
        for seed in plan.seeds
        for offer in task.slot_config[seed.slot].blueprints
        if offer.name == seed.blueprint
    )
