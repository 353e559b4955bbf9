"""A model of what plans gain: Bayesian linear regression on slot × blueprint × time, with pair terms.

gain of a plan = Σ over seeds (slot + blueprint + cell + slot at time + cell at time)
               + Σ over pairs of seeds (pair of slots + pair of cells)            a cell is a slot with a blueprint

Coarse terms let what was seen of one cell tell about its neighbours; fine ones correct them. The variance of each group
of terms comes from the evidence (MacKay's updates), with a prior that holds until there is data. Rent is known, so the
model predicts gains and subtracts it.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline import rent
from esper.simic.evaluation.yardsticks import extensions
from esper.tamiyo.policies import Plan, PlannedSeed
from esper.tamiyo.policies.open_loop import MAX_SEEDS
from esper.tolaria import Task

Array = NDArray[np.float64]
Term = tuple[str | int, ...]  # its group, then what it stands for
PRIOR_VARIANCES = {
    "slot": 0.5,
    "blueprint": 0.5,
    "cell": 1.0,
    "slot at time": 0.1,
    "cell at time": 0.1,
    "pair of slots": 0.25,
    "pair of cells": 0.08,
}
"""By group of terms, in quarters of the mean squared gain"""
PRIOR_WEIGHT = 4.0  # the weight of these priors, in terms that the data determine
HOST_VARIANCE = 1.0  # variance that all plans on a host share, over that of the rest
UPDATES = 8  # of the variances in a fit
LEAST_NOISE = 1e-4  # variance of a trial, in the units of PRIOR_VARIANCES; none at all would make the matrix singular


class Posterior(NamedTuple):
    """The terms' distribution given all trials: mean (terms,), and a root (terms, terms) of its covariance."""

    mean: Array
    root: Array
    noise: float  # variance of a trial

    def draw(self, rng: np.random.Generator) -> Array:
        """One draw (terms,)."""
        return self.mean + self.root @ rng.normal(size=len(self.mean))


class PlanModel:
    """The terms of a task's plans, and what trials say about them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sizes = {
            (slot.slot_id, offer.name): offer.parameters for slot in task.slot_config.slots for offer in slot.blueprints
        }
        self.number_of: dict[Term, int] = {}
        singles = extensions(Plan(), task)
        pairs = [Plan(seeds) for seeds in combinations(_one_time(singles), 2) if seeds[0].slot != seeds[1].slot]
        for plan in (*singles, *pairs):
            for term in _terms(plan):
                self.number_of.setdefault(term, len(self.number_of))
        groups = [str(term[0]) for term in self.number_of]
        self.groups = {name: np.array([group == name for group in groups]) for name in PRIOR_VARIANCES}
        self._longer: dict[Plan, tuple[list[Plan], Array, Array]] = {}

    def design(self, plans: list[Plan]) -> Array:
        """Which terms (plans, terms) each plan has."""
        matrix = np.zeros((len(plans), len(self.number_of)))
        for row, plan in zip(matrix, plans, strict=True):
            row[[self.number_of[term] for term in _terms(plan)]] = 1.0
        return matrix

    def rents(self, plans: list[Plan]) -> Array:
        """Rent (plans,) of all planned seeds, points."""
        grown = [sum(self.sizes[seed.slot, seed.blueprint] for seed in plan.seeds) for plan in plans]
        return np.array([rent(float(parameters), self.task.host_parameters) for parameters in grown])

    def objectives(self, plans: list[Plan], terms: Array) -> Array:
        """Objectives (plans,) by given terms."""
        return np.asarray(self.design(plans) @ terms - self.rents(plans))

    def best(self, terms: Array) -> Plan:
        """The best plan by given terms: the best seed, then the best to add to it, as long as it adds something."""
        plan, value = Plan(), -np.inf
        while len(plan.seeds) < MAX_SEEDS:
            if plan not in self._longer:
                longer = extensions(plan, self.task)
                self._longer[plan] = longer, self.design(longer), self.rents(longer)
            longer, design, rents = self._longer[plan]
            objectives = design @ terms - rents
            if not longer or objectives.max() <= value:
                break
            plan, value = longer[int(objectives.argmax())], float(objectives.max())
        return plan

    def fit(self, trials: Mapping[Plan, Mapping[int, float]]) -> Posterior:
        """The posterior given objectives by plan and host."""
        plans = list(trials)
        rows = np.repeat(np.arange(len(plans)), [len(by_host) for by_host in trials.values()])
        hosts = np.array([host for by_host in trials.values() for host in by_host])
        gains = np.array([value for by_host in trials.values() for value in by_host.values()])
        gains = gains + self.rents(plans)[rows]
        typical = float(np.mean(gains**2)) / 4 + 1e-6
        parts = centred(np.column_stack([self.design(plans)[rows], gains]), hosts)
        design, gains = parts[:, :-1], parts[:, -1]
        gram, moment = design.T @ design, design.T @ gains

        prior = {name: typical * share for name, share in PRIOR_VARIANCES.items()}
        variances, noise = dict(prior), float(gains.var()) / 2 + LEAST_NOISE * typical
        for _ in range(UPDATES):
            scale = np.sqrt(sum(variances[name] * chosen for name, chosen in self.groups.items()))
            # In units of the prior's deviations, so that no group makes the matrix singular.
            precision = scale[:, None] * gram * scale / noise + np.eye(len(scale))
            root = np.linalg.inv(np.linalg.cholesky(precision)).T
            mean = scale * (root @ (root.T @ (scale * moment))) / noise
            determined = 1 - (root**2).sum(1)  # by the data and not by the prior: 0 to 1 per term
            errors = gains - design @ mean
            noise = float(errors @ errors + noise) / (max(len(gains) - float(determined.sum()), 0.0) + 1)
            noise = max(noise, LEAST_NOISE * typical)
            for name, chosen in self.groups.items():
                squares = float((mean[chosen] ** 2).sum()) + PRIOR_WEIGHT * prior[name]
                variances[name] = squares / (float(determined[chosen].sum()) + PRIOR_WEIGHT)
        return Posterior(mean, scale[:, None] * root, noise)


def centred(rows: Array, hosts: NDArray[np.int64]) -> Array:
    """Rows (n, columns) less a share of the mean over the rows of the same host, so that their noise is independent.

    With m rows on a host and variances h of the host and 1 of the rest, the share is 1 − 1 / √(1 + m·h): nothing for
    h = 0, the whole mean for a large h.
    """
    _, number, counts = np.unique(hosts, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), rows.shape[1]))
    np.add.at(sums, number, rows)
    shares = 1 - 1 / np.sqrt(1 + counts * HOST_VARIANCE)
    return np.asarray(rows - (sums * (shares / counts)[:, None])[number])


def _one_time(singles: list[Plan]) -> list[PlannedSeed]:
    """One seed per cell; pair terms do not depend on the time."""
    return list({(plan.seeds[0].slot, plan.seeds[0].blueprint): plan.seeds[0] for plan in singles}.values())


def _terms(plan: Plan) -> list[Term]:
    terms: list[Term] = []
    for seed in plan.seeds:
        slot, blueprint, when = seed.slot, seed.blueprint, seed.germinate_at
        terms += [("slot", slot), ("blueprint", blueprint), ("cell", slot, blueprint)]
        terms += [("slot at time", slot, when), ("cell at time", slot, blueprint, when)]
    for one, other in combinations(sorted((seed.slot, seed.blueprint) for seed in plan.seeds), 2):
        terms += [("pair of slots", one[0], other[0]), ("pair of cells", *one, *other)]
    return terms
