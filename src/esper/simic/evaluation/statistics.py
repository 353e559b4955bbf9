"""Comparing policies on the same hosts: differences with their intervals, and what may be claimed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import p_value, t_quantile
from esper.simic.evaluation.policies import base_of, is_learned
from esper.simic.evaluation.results import Result

Array = NDArray[np.float64]
BOOTSTRAPS = 4000


@dataclass(frozen=True)
class Difference:
    """One policy against another."""

    mean: float
    low: float
    """95 % interval over training seeds; over hosts where there is one seed, which is a report and no claim"""
    high: float
    bootstrap_low: float
    """95 % interval of the two-level bootstrap: seeds, then hosts"""
    bootstrap_high: float
    p: float
    """Two-sided, not adjusted"""
    seeds: int
    """Training seeds of the policy that has more of them"""


def compare(
    mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], rng_seed: int = 0, *, paired: bool = False
) -> Difference:
    """Differences over the same hosts; one row of values per training seed, one row in all for a rule.

    The unit is the training seed: per seed the mean difference over hosts, then a t-interval over seeds. Two policies
    with several seeds each are compared by Welch's interval, as their seeds have nothing to do with each other, unless
    they are `paired`: row i of both comes from the same training. Where neither has several, the unit is the host.
    """
    left, right = np.asarray(mine, dtype=float), np.asarray(theirs, dtype=float)
    if left.shape[1] != right.shape[1]:
        raise BadValueError(f"policies on {left.shape[1]} and {right.shape[1]} hosts; they must be the same hosts")
    if paired and len(left) != len(right):
        raise BadValueError(f"{len(left)} and {len(right)} training seeds cannot be paired")
    if len(left) > 1 and len(right) > 1 and not paired:
        parts = [rows.mean(1) for rows in (left, right)]
        shares = [float(part.var(ddof=1)) / len(part) for part in parts]
        mean, error = float(parts[0].mean() - parts[1].mean()), math.sqrt(sum(shares))
        spread = sum(share**2 / (len(part) - 1) for share, part in zip(shares, parts, strict=True))
        freedom = sum(shares) ** 2 / spread if spread else float(len(left) + len(right) - 2)
    else:
        gaps = left - right
        units = gaps.mean(1) if len(gaps) > 1 else gaps[0]
        mean, freedom = float(units.mean()), float(len(units) - 1)
        error = float(units.std(ddof=1)) / math.sqrt(len(units)) if len(units) > 1 else math.inf
    half = t_quantile(freedom) * error if freedom > 0 else math.inf
    low, high = (
        _bootstrap(left - right, np.zeros_like(left[:1]), rng_seed) if paired else _bootstrap(left, right, rng_seed)
    )
    p = p_value(mean, error, freedom) if freedom > 0 else 1.0
    return Difference(mean, mean - half, mean + half, low, high, p, max(len(left), len(right)))


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


CLAIM_SEEDS = 5
"""Training seeds below which a difference is a report and no claim."""
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
    """At least five training seeds of every learned policy in it; else it is a report and no claim"""
    superior: bool
    """Enough seeds, Holm-adjusted p below 0.05, and above 0"""
    not_worse: bool
    """Enough seeds, and the lower end of the 95 % interval above −margin"""
    margin: float


Rows = dict[str, list[list[float]]]
"""By policy: objectives per training seed and host."""


def compare_all(results: dict[str, list[Result]], margin: float = MARGIN) -> list[Claim]:
    """Every learned policy against all others by objective: see `compare_rows`."""
    return compare_rows({name: [result.objective for result in found] for name, found in results.items()}, margin)


def compare_rows(rows: Rows, margin: float = MARGIN) -> list[Claim]:
    """Every learned policy against all others, Holm-adjusted; without one, the first against the rest.

    A claim needs five training seeds of every learned policy in it. A control of a policy is paired with it seed by
    seed.
    """
    firsts = [name for name in rows if is_learned(name)] or list(rows)[:1]
    pairs = [(name, other) for place, name in enumerate(firsts) for other in rows if other not in firsts[: place + 1]]
    differences = [compare(rows[name], rows[other], paired=base_of(other) == name) for name, other in pairs]
    adjusted = holm([difference.p for difference in differences])

    return [
        _claim(name, other, difference, p, margin, [len(rows[n]) for n in (name, other) if is_learned(base_of(n))])
        for (name, other), difference, p in zip(pairs, differences, adjusted, strict=True)
    ]


def _claim(name: str, other: str, difference: Difference, adjusted_p: float, margin: float, seeds: list[int]) -> Claim:
    """`seeds`: how many each learned policy of the two has."""
    enough = bool(seeds) and min(seeds) >= CLAIM_SEEDS
    return Claim(
        name,
        other,
        difference,
        adjusted_p,
        enough,
        enough and adjusted_p < 0.05 and difference.mean > 0,
        enough and difference.low > -margin,
        margin,
    )
