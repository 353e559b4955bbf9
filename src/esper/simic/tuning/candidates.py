"""The candidates of a search: plans of one to three seeds, and thresholds of the heuristic."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from random import Random

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.simic.tuning.search import FIRST_HOSTS, FIRST_SHARE, Search
from esper.tamiyo import ActionTable, Policy
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo, Plan, PlannedSeed, SchedulePolicy
from esper.tamiyo.policies.heuristic import OFFER_CHOICES, HeuristicState
from esper.tamiyo.policies.open_loop import MAX_SEEDS
from esper.tamiyo.policy import PolicyView
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


RANDOM_SHARE, NEAR_SHARE = 0.5, 0.25
"""Of the episodes, for drawn configurations and for neighbours of the best; the rest is the finalists'."""
MOST_CHANGES = 3
"""Fields in which a neighbour may differ."""

Value = int | float | str
Draws = dict[str, Callable[[Random], Value]]


def search_heuristic(search: Search[HeuristicConfig], task: Task) -> tuple[HeuristicConfig, float]:
    """The configuration with the best mean objective, and that. The default is among the first and the finalists."""
    default, draws, rng = HeuristicConfig(), ranges(task), search.rng("configurations")
    share = int(RANDOM_SHARE * search.budget)
    first = _collect(lambda: _build({name: draw(rng) for name, draw in draws.items()}), {default}, _affordable(share))
    drawn = search.halve("random", [default, *first], share)
    share = int(NEAR_SHARE * search.budget)
    near = _collect(lambda: vary(drawn[0], draws, rng), set(search.found), _affordable(share))
    varied = search.halve("near the best", near, share)
    return search.decide(list(dict.fromkeys((default, *drawn[:2], varied[0]))))


def ranges(task: Task) -> Draws:
    """How each threshold is drawn. Rent is no threshold: it is what the objective charges."""
    return {
        "patience": lambda rng: rng.randint(0, 5),
        "plateau": lambda rng: rng.uniform(0, 4),
        "at_once": lambda rng: rng.randint(1, len(task.slot_ids)),
        "germinate_left": lambda rng: rng.randint(8, max(8, task.steps - 1)),
        "choice": lambda rng: rng.choice(OFFER_CHOICES),
        "cost_weight": lambda rng: 10 ** rng.uniform(-2, 0.5),
        "training_steps": lambda rng: rng.randint(1, 6),
        "least_audition": lambda rng: rng.uniform(-4, 8),
        "trial": lambda rng: rng.randint(2, 10),
        "advance_left": lambda rng: rng.randint(5, 8),
        "least_contribution": lambda rng: rng.uniform(-2, 4),
        "prune_below": lambda rng: rng.uniform(-4, 2),
        "ending": lambda rng: rng.randint(1, 5),
        "errors": lambda rng: rng.uniform(0, 2),
    }


def vary(config: HeuristicConfig, draws: Draws, rng: Random) -> HeuristicConfig:
    """A neighbour: a few fields, moved half the way to a fresh draw."""
    values = asdict(config)
    for name in rng.sample(list(draws), rng.randint(1, MOST_CHANGES)):
        old, new = values[name], draws[name](rng)
        values[name] = new if isinstance(new, str) else type(new)((old + new) / 2)
    return _build(values)


def _build(values: dict[str, Value]) -> HeuristicConfig:
    trial, training_steps = values["trial"], values["training_steps"]
    assert isinstance(trial, int)
    assert isinstance(training_steps, int)
    return HeuristicConfig(**{**values, "trial": max(trial, training_steps)})  # type: ignore[arg-type]  # by name


def _affordable(episodes: int) -> int:
    """How many candidates a first look of all its hosts can pay."""
    return max(1, int(FIRST_SHARE * episodes) // FIRST_HOSTS)


def _collect(make: Callable[[], HeuristicConfig], known: set[HeuristicConfig], count: int) -> list[HeuristicConfig]:
    """So many that differ from each other and from those that are known."""
    found: dict[HeuristicConfig, None] = {}
    while len(found) < count:
        made = make()
        if made not in known:
            found[made] = None
    return list(found)


class HeuristicByEnv:
    """Heuristics side by side, one per env.

    Each distinct one acts on the whole view and its rows are taken: rules look at one env at a time, so what a
    configuration would do elsewhere changes nothing, and some twenty small tensor expressions more per step cost far
    less than the episodes one after the other would.
    """

    def __init__(self, task: Task, table: ActionTable, configs: Sequence[HeuristicConfig]) -> None:
        distinct = list(dict.fromkeys(configs))
        self.table = table
        self.policies = [HeuristicTamiyo(table, task.slot_config, config) for config in distinct]
        self.whose = torch.tensor([distinct.index(config) for config in configs])

    def initial_state(self, seeds: list[int]) -> list[HeuristicState]:
        """One per distinct heuristic."""
        return [policy.initial_state(seeds) for policy in self.policies]

    def act(
        self, view: PolicyView, state: list[HeuristicState], uniform: Tensor
    ) -> tuple[Tensor, list[HeuristicState]]:
        """Each env by its own rules."""
        acted = [policy.act(view, its, uniform) for policy, its in zip(self.policies, state, strict=True)]
        actions = torch.stack([actions for actions, _ in acted])
        env = torch.arange(len(uniform), device=actions.device)
        return actions[self.whose.to(actions.device), env], [its for _, its in acted]
