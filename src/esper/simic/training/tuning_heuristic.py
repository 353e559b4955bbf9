"""The best thresholds of the heuristic: drawn at random, then varied a little around the best."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from random import Random

import torch
from torch import Tensor

from esper.simic.training.tuning_search import FIRST_HOSTS, FIRST_SHARE, Search
from esper.tamiyo import ActionTable
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo
from esper.tamiyo.policies.heuristic import OFFER_CHOICES, HeuristicMemory
from esper.tamiyo.policy import View
from esper.tolaria import Task

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

    def initial_memory(self, seeds: list[int]) -> list[HeuristicMemory]:
        """One per distinct heuristic."""
        return [policy.initial_memory(seeds) for policy in self.policies]

    def act(self, view: View, memory: list[HeuristicMemory], uniform: Tensor) -> tuple[Tensor, list[HeuristicMemory]]:
        """Each env by its own rules."""
        acted = [policy.act(view, its, uniform) for policy, its in zip(self.policies, memory, strict=True)]
        actions = torch.stack([actions for actions, _ in acted])
        env = torch.arange(len(uniform), device=actions.device)
        return actions[self.whose.to(actions.device), env], [its for _, its in acted]
