"""Search of the heuristic's thresholds: random configurations, then neighbours of the best."""

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from esper.simic.tuning.search import FIRST_HOSTS, FIRST_SHARE, Search
from esper.tamiyo.policies import HeuristicConfig
from esper.tamiyo.policies.heuristic import OFFER_CHOICES
from esper.tolaria import Task

RANDOM_SHARE, NEAR_SHARE = 0.5, 0.25  # shares for random configurations and neighbours of the best; the rest: final
MOST_CHANGES = 3  # most fields in which a neighbour differs

Draws = dict[str, Callable[[random.Random], int | float | str]]


def search_heuristic(search: Search[HeuristicConfig], task: Task) -> tuple[HeuristicConfig, float]:
    """The best configuration and its mean objective. The default one is among the first and in the final."""
    default, draws, rng = HeuristicConfig(), ranges(task), search.rng("configurations")
    share = int(RANDOM_SHARE * search.budget)
    first = _collect(lambda: _build({name: draw(rng) for name, draw in draws.items()}), {default}, share)
    drawn = search.halve("random", [default, *first], share)
    share = int(NEAR_SHARE * search.budget)
    near = _collect(lambda: vary(drawn[0], draws, rng), set(search.objectives), share)
    varied = search.halve("near the best", near, share)
    return search.decide(list(dict.fromkeys((default, *drawn[:2], varied[0]))))


def ranges(task: Task) -> Draws:
    """How each threshold is drawn. Rent is part of the objective, not a threshold."""
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


def vary(config: HeuristicConfig, draws: Draws, rng: random.Random) -> HeuristicConfig:
    """A neighbour: a few fields moved halfway towards a fresh draw."""
    values = asdict(config)
    for name in rng.sample(list(draws), rng.randint(1, MOST_CHANGES)):
        old, new = values[name], draws[name](rng)
        values[name] = new if isinstance(new, str) else type(new)((old + new) / 2)
    return _build(values)


def _build(values: dict[str, Any]) -> HeuristicConfig:  # Any: fields by name
    return HeuristicConfig(**{**values, "trial": max(values["trial"], values["training_steps"])})


def _collect(make: Callable[[], HeuristicConfig], known: set[HeuristicConfig], episodes: int) -> list[HeuristicConfig]:
    """As many new configurations as a first rung with these episodes can run on all its hosts."""
    configs: list[HeuristicConfig] = []
    while len(configs) < max(1, int(FIRST_SHARE * episodes) // FIRST_HOSTS):
        if (config := make()) not in known and config not in configs:
            configs.append(config)
    return configs
