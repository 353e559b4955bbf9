"""Searches of a plan: by a model of all plans, or by successive halving."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, get_args

import numpy as np

from esper.leyline import BadValueError
from esper.simic.evaluation.yardsticks import extensions
from esper.simic.tuning.plan_model import PlanModel, Posterior
from esper.simic.tuning.search import Search
from esper.tamiyo.policies import Plan
from esper.tamiyo.policies.open_loop import MAX_SEEDS
from esper.tolaria import Task

SearchMethod = Literal["model", "halving"]
SEARCH_METHODS: tuple[SearchMethod, ...] = get_args(SearchMethod)

RANDOM_SHARE, FINAL_SHARE = 0.25, 0.2  # of the episodes, for random plans and for the final; the rest: proposals
TWO_SEEDS = 0.25  # share of the random plans that have two seeds
MOST_FINALISTS = 3
PLANS = 7  # per host
HOSTS = 8  # most per batch
BATCHES = 6  # a small budget has at least this number of batches, each of which learns from those before it
ATTEMPTS = 40  # proposals per plan of a lineup; if they agree, it gets fewer plans

SHARES = (0.5, 0.2, 0.1)  # halving: shares of the episodes for plans of one, two and three seeds; the rest: final


def search_schedule(search: Search[Plan], task: Task, method: SearchMethod = "model") -> tuple[Plan, float]:
    """The best plan and its mean objective in the final; waiting, at 0 points, if no plan gains."""
    if not extensions(Plan(), task):
        raise BadValueError(f"task {task.name!r}: its budget of {task.parameter_budget} parameters allows no seed")
    finalists = (propose_by_model if method == "model" else propose_by_halving)(search, task)
    chosen, mean = search.decide(finalists)
    return (chosen, mean) if mean > 0 else (Plan(), 0.0)


def propose_by_model(search: Search[Plan], task: Task) -> list[Plan]:
    """Finalists: random plans, then batches by Thompson sampling, then the plans of the best posterior means.

    Each plan of a batch is the best one by a draw from the posterior. Every host has plans of its own, so that many
    are seen; those of one host share its control and its luck.
    """
    model, rng = PlanModel(task), np.random.default_rng(search.rng("posterior").getrandbits(64))
    final = max(MOST_FINALISTS, round(FINAL_SHARE * search.budget))
    hosts = max(1, min(HOSTS, (search.budget - final) // (BATCHES * PLANS)))
    dealt = deal(task, search.rng("random plans"))
    while search.used < RANDOM_SHARE * search.budget:
        _play_batch(search, "random", dealt.__next__, hosts, search.left - final)
    posterior = model.fit(search.objectives)
    while search.left > final:
        differ = _play_batch(search, "proposed", partial(_draw, model, posterior, rng), hosts, search.left - final)
        posterior = model.fit(search.objectives)
        if not differ:
            break  # what is left is worth more in the final
    tried = (*search.objectives, model.best(posterior.mean))
    plans = list({frozenset(plan.seeds): plan for plan in tried}.values())
    order = np.argsort(-model.objectives(plans, posterior.mean), kind="stable")
    return [plans[index] for index in order[:MOST_FINALISTS]]


def deal(task: Task, rng: random.Random) -> Iterator[Plan]:
    """Random plans without end: all plans of one seed in random order, again and again, some with a second seed."""
    singles = extensions(Plan(), task)
    while True:
        for plan in rng.sample(singles, len(singles)):
            longer = extensions(plan, task) if rng.random() < TWO_SEEDS else []
            yield rng.choice(longer) if longer else plan


def _draw(model: PlanModel, posterior: Posterior, rng: np.random.Generator) -> Plan:
    return model.best(posterior.draw(rng))


def _play_batch(search: Search[Plan], stage: str, propose: Callable[[], Plan], hosts: int, episodes: int) -> bool:
    """Try proposals on fresh hosts, the same number on each, with at most these episodes.

    Returns whether proposals differ.
    """
    hosts = min(hosts, max(1, episodes // PLANS))
    lineups = [_lineup(propose, min(PLANS, episodes)) for _ in range(hosts)]
    width = min(map(len, lineups))
    search.play(stage, [lineup[:width] for lineup in lineups], search.fresh(hosts))
    return width > 1


def _lineup(propose: Callable[[], Plan], count: int) -> list[Plan]:
    """Different proposals for one host; the order of a plan's seeds makes no difference."""
    plans: dict[frozenset[object], Plan] = {}
    for _ in range(ATTEMPTS * count):
        if len(plans) == count:
            break
        plan = propose()
        plans.setdefault(frozenset(plan.seeds), plan)
    return list(plans.values())


def propose_by_halving(search: Search[Plan], task: Task) -> list[Plan]:
    """Finalists: the two best plans of one seed, and the best longer ones if they are better than what they extend."""
    plans = extensions(Plan(), task)
    finalists = search.halve("one seed", plans, int(SHARES[0] * search.budget))[:2]
    best = finalists[0]
    for seeds, share in zip(range(2, MAX_SEEDS + 1), SHARES[1:], strict=True):
        if not (longer := extensions(best, task)):
            break
        longest = search.halve(f"{seeds} seeds", longer, int(share * search.budget))[0]
        if search.ranked([best, longest])[0] is best:
            break
        best = longest
        finalists.append(best)
    return finalists
