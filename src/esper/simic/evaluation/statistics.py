"""Comparing policies on the same hosts: training seeds × hosts as crossed random effects, and what may be claimed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import CLAIM_SEEDS, p_value, t_quantile
from esper.simic.evaluation.policies import PolicySpec, base_of
from esper.simic.evaluation.results import Result

Array = NDArray[np.float64]
BOOTSTRAPS = 4000
CAUTION = 3.0
"""How much a sum of mean squares is distrusted; 0 gives Satterthwaite's degrees of freedom"""


@dataclass(frozen=True)
class Difference:
    """One policy against another."""

    mean: float
    low: float
    """95 % interval for new training seeds and new hosts; for new hosts only where there is one seed, a report"""
    high: float
    bootstrap_low: float
    """95 % interval of the two-level bootstrap: seeds, then hosts"""
    bootstrap_high: float
    p: float
    """Two-sided, not adjusted"""
    seeds: int
    """Training or search seeds of the policy that has more of them"""


class Estimate(NamedTuple):
    """A mean difference with its standard error and degrees of freedom, one of each per comparison (…)."""

    mean: Array
    error: Array
    freedom: Array


class _MeanSquares(NamedTuple):
    """Of one policy, divided by its number of values, so that they are variances of its mean (…)."""

    seed: Array
    """Between seeds; contains the rest"""
    rest: Array
    seed_freedom: int
    rest_freedom: int


def compare(
    mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], rng_seed: int = 0, *, paired: bool = False
) -> Difference:
    """Differences over the same hosts; one row of values per training seed, one row in all for a rule.

    The interval comes from `crossed`. Two policies with several seeds each have independent seeds, unless they are
    `paired`: row i of both comes from the same training. A single host gives no interval.
    """
    left, right = np.asarray(mine, dtype=float), np.asarray(theirs, dtype=float)
    if left.shape[1] != right.shape[1]:
        raise BadValueError(f"policies on {left.shape[1]} and {right.shape[1]} hosts; they must be the same hosts")
    if paired and len(left) != len(right):
        raise BadValueError(f"{len(left)} and {len(right)} training seeds cannot be paired")
    seeds = max(len(left), len(right))
    if paired:
        left, right = left - right, np.zeros_like(left[:1])
    low, high = _bootstrap(left, right, rng_seed)
    if left.shape[1] == 1:
        return Difference(float(left.mean() - right.mean()), -math.inf, math.inf, low, high, 1.0, seeds)
    mean, error, freedom = (float(value) for value in crossed(left, right))
    half = t_quantile(freedom) * error
    return Difference(mean, mean - half, mean + half, low, high, p_value(mean, error, freedom), seeds)


def crossed(left: Array, right: Array) -> Estimate:
    """Mean of left − right (…, seeds, hosts) with seeds and hosts as crossed random effects; two hosts or more.

    Variance of the mean = seed part / seeds + host part / hosts + rest / (seeds · hosts). The seed parts of both
    policies add up; a policy with one row has none. The host part is that of the difference. They come from mean
    squares M, as M_seed − M_rest and M_host − M_rest. A part below zero counts as zero, and its M is omitted.

    Degrees of freedom are Satterthwaite's: variance² / Σ (c·M)² / f over the mean squares that remain. There is at
    least one. The terms of seeds and hosts are multiplied by 1 + CAUTION · (1 − share) / f, where share is their part
    of the variance. Without this, a small M_seed (f = 4) gives a small error and many degrees of freedom at once.
    Intervals then cover only 94.2 % where seeds and hosts weigh alike.
    `benchmarks/crossed_statistics.py` measures how often the intervals and verdicts are wrong.
    """
    hosts = left.shape[-1]
    gaps = left.mean(-2) - right.mean(-2)
    host, nothing = gaps.var(-1, ddof=1) / hosts, np.zeros(gaps.shape[:-1])
    policies = [_mean_squares(rows) for rows in (left, right) if rows.shape[-2] > 1]
    seed, rest = sum((one.seed for one in policies), nothing), sum((one.rest for one in policies), nothing)

    by_seed, by_host = seed > rest, host > rest
    variance = np.where(by_host, host, rest) + np.where(by_seed, seed - rest, 0.0)
    uncertainty = np.where(by_host, host**2 / (hosts - 1) * _caution(host, variance, hosts - 1), 0.0)
    for one in policies:
        of_seeds = one.seed**2 / one.seed_freedom * _caution(seed, variance, one.seed_freedom)
        uncertainty += np.where(by_seed, of_seeds, 0.0)
        # The seed part subtracts the rest and the host part contains it: it cancels where only one of them counts.
        uncertainty += np.where(by_seed == by_host, one.rest**2 / one.rest_freedom, 0.0)
    freedom = np.divide(variance**2, uncertainty, out=np.ones_like(variance), where=uncertainty > 0)
    return Estimate(gaps.mean(-1), np.sqrt(variance), np.maximum(freedom, 1.0))


def _mean_squares(rows: Array) -> _MeanSquares:
    """Of one policy's values (…, seeds, hosts)."""
    seeds, hosts = rows.shape[-2:]
    by_seed = rows.mean(-1, keepdims=True)
    residuals = rows - by_seed
    residuals -= residuals.mean(-2, keepdims=True)
    freedom = (seeds - 1) * (hosts - 1)
    rest = np.einsum("...sh,...sh->...", residuals, residuals) / freedom / (seeds * hosts)
    return _MeanSquares(by_seed[..., 0].var(-1, ddof=1) / seeds, rest, seeds - 1, freedom)


def _caution(part: Array, variance: Array, freedom: int) -> Array:
    """Factor of the uncertainty of mean squares that make up this part of the variance: see `crossed`."""
    share = np.divide(part, variance, out=np.ones_like(variance), where=part < variance)
    return 1 + CAUTION * (1 - share) / freedom


def _bootstrap(left: Array, right: Array, rng_seed: int) -> tuple[float, float]:
    """Draw each policy's seeds with replacement, then hosts for both; the middle 95 % of the mean differences."""
    dice = np.random.default_rng(derive_seed(rng_seed, "bootstrap"))
    means = np.empty(BOOTSTRAPS)
    for place in range(BOOTSTRAPS):
        hosts = dice.integers(left.shape[1], size=left.shape[1])
        drawn = [rows[dice.integers(len(rows), size=len(rows))][:, hosts].mean() for rows in (left, right)]
        means[place] = drawn[0] - drawn[1]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment for several comparisons, in the order given."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


MARGIN = 1.0
"""Points by which a policy may be worse and still be called not worse."""


@dataclass(frozen=True)
class Claim:
    """One policy against another, adjusted for all comparisons of the task."""

    policy: str
    against: str
    difference: Difference
    adjusted_p: float
    enough_seeds: bool
    """At least five seeds of every sampled policy in it, and at least one such; else it is a report and no claim"""
    superior: bool
    """Enough seeds, Holm-adjusted p below 0.05, and above 0"""
    not_worse: bool
    """Enough seeds, and the lower end of the 95 % interval above −margin"""
    margin: float


Rows = dict[str, list[list[float]]]
"""By policy: objectives per training or search seed and host."""


def compare_all(results: dict[str, list[Result]], margin: float = MARGIN) -> list[Claim]:
    """Every learned policy against all others by objective: see `compare_rows`."""
    return compare_rows({name: [result.objective for result in found] for name, found in results.items()}, margin)


def compare_rows(rows: Rows, margin: float = MARGIN) -> list[Claim]:
    """Every learned policy against all others, Holm-adjusted; without one, the first against the rest.

    A policy is sampled if it is learned or has several rows (plans of several searches). A claim needs five seeds of
    every sampled policy in it. Their seeds are independent of each other, except that a control of a policy is paired
    with it seed by seed.
    """
    firsts = [name for name in rows if PolicySpec.parse(name).learned] or list(rows)[:1]
    pairs = [(name, other) for place, name in enumerate(firsts) for other in rows if other not in firsts[: place + 1]]
    differences = [compare(rows[name], rows[other], paired=base_of(other).text == name) for name, other in pairs]
    claims = []
    for (name, other), difference, p in zip(pairs, differences, holm([each.p for each in differences]), strict=True):
        seeds = [len(rows[each]) for each in (name, other) if base_of(each).learned or len(rows[each]) > 1]
        enough = bool(seeds) and min(seeds) >= CLAIM_SEEDS
        superior = enough and p < 0.05 and difference.mean > 0
        not_worse = enough and difference.low > -margin
        claims.append(Claim(name, other, difference, p, enough, superior, not_worse, margin))
    return claims
