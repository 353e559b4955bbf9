"""Comparing policies: paired over hosts, with the training seed as the unit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.leyline import derive_seed

# Two-sided 97.5 % points of Student's t by degrees of freedom; the normal one beyond the table.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL975 = 1.960
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


def compare(mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], rng_seed: int = 0) -> Difference:
    """Differences by training seed and host, `mine[seed][host] − theirs[seed or only one][host]`, same hosts.

    Per training seed the mean over hosts; then a t-interval over seeds. A policy without training seeds has one row,
    which is paired with each of the other's.
    """
    left, right = np.asarray(mine, dtype=float), np.asarray(theirs, dtype=float)
    gaps = left - right  # (seeds, hosts), broadcast
    units = gaps.mean(1) if len(gaps) > 1 else gaps[0]
    mean, half, p = _t_interval(units)
    low, high = _bootstrap(gaps, rng_seed)
    return Difference(mean, mean - half, mean + half, low, high, p, len(gaps))


def _t_interval(units: "np.typing.NDArray[np.float64]") -> tuple[float, float, float]:
    """Mean, half-width of its 95 % interval, two-sided p of being 0."""
    n, mean = len(units), float(units.mean())
    if n < 2:
        return mean, math.inf, 1.0
    error = float(units.std(ddof=1)) / math.sqrt(n)
    point = _T975[n - 2] if n - 2 < len(_T975) else _NORMAL975
    return mean, point * error, _p_value(mean, error, n - 1)


def _p_value(mean: float, error: float, freedom: int) -> float:
    """Of Student's t, by integrating its density numerically."""
    if error == 0:
        return 0.0 if mean else 1.0
    t = abs(mean) / error
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    # Substituting x = tan(u) makes the tail a finite stretch.
    angles = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 4001)
    density = np.cos(angles) ** (freedom - 1)
    return float(min(1.0, 2 * scale * math.sqrt(freedom) * np.trapezoid(density, angles)))


def _bootstrap(gaps: "np.typing.NDArray[np.float64]", rng_seed: int) -> tuple[float, float]:
    """Draw seeds with replacement, then hosts; the middle 95 % of the means."""
    dice = np.random.default_rng(derive_seed(rng_seed, "bootstrap"))
    seeds, hosts = gaps.shape
    rows = dice.integers(seeds, size=(BOOTSTRAPS, seeds))
    columns = dice.integers(hosts, size=(BOOTSTRAPS, hosts))
    means = np.array([gaps[np.ix_(row, column)].mean() for row, column in zip(rows, columns, strict=True)])
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment for several comparisons, in the order given."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
