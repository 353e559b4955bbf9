"""How often verdicts are wrong, by simulation: seeds × hosts with known variances, thousands of evaluations per cell.

    python benchmarks/crossed_statistics.py

Each cell draws evaluations with a deviation over hosts, over training seeds and of the rest, and judges them as
`esper evaluate` does (`simic.evaluation.statistics.crossed`). Either one policy has seeds (learned − rule), or both
have (learned − learned). The columns are:

- how often *superior* is said where the true difference is 0, and *not worse* where it is −margin
- how many 95 % intervals contain the truth
- the power, as a share of that of a test which knows the variances, at effects where the latter is 0.8, 0.9 and 0.99
- the same share for an ideal t-test with the degrees of freedom that the true variances give, because no test with few
  seeds can know their variance
- how often a t-interval over seeds, blind to hosts, would say *superior*
"""

import argparse
import itertools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from harness import RESULTS, print_table, write_result

from esper.leyline.numbers import t_quantile
from esper.simic.evaluation.statistics import MARGIN, Array, crossed

HOST_DEVIATIONS = (0.0, 1.0, 2.5, 5.0, 9.0)
SEED_DEVIATIONS = (0.2, 0.5, 1.0, 2.0)
REST_DEVIATIONS = (1.0, 3.0)
POWERS = (0.8, 0.9, 0.99)
"""Of the test that knows the variances, at the effects that are tried"""
BARS = {"superior": 6.0, "not_worse": 4.0, "least_coverage": 94.0, "most_coverage": 97.0, "least_power": 0.9}
INVERSES = np.linspace(1e-4, 1.0, 120)
"""1 / degrees of freedom at which Student's quantile is computed; between them it is interpolated"""
QUANTILES = np.array([t_quantile(1 / inverse) for inverse in INVERSES])


class Design(NamedTuple):
    """How an evaluation is made up."""

    learned: int
    """Policies that have training seeds: 1 or 2"""
    host: float
    """Standard deviation over hosts, of the difference"""
    seed: float
    """Over training seeds, of each learned policy"""
    rest: float
    seeds: int
    hosts: int

    @property
    def variance(self) -> float:
        """Of the mean difference."""
        own = self.seed**2 / self.seeds + self.rest**2 / (self.seeds * self.hosts)
        return self.learned * own + self.host**2 / self.hosts

    @property
    def freedom(self) -> float:
        """Satterthwaite's degrees of freedom with the true variances."""
        rest = self.rest**2 / (self.seeds * self.hosts)
        seed, host = self.seed**2 / self.seeds + rest, self.host**2 / self.hosts + self.learned * rest
        parts = [seed**2 / (self.seeds - 1), rest**2 / ((self.seeds - 1) * (self.hosts - 1))]
        return self.variance**2 / (self.learned * sum(parts) + host**2 / (self.hosts - 1))


@dataclass(frozen=True)
class Cell:
    """What was measured: percentages, and powers as shares, by the power of the test that knows."""

    superior: float
    not_worse: float
    coverage: float
    power: dict[str, float]
    """As a share of the test that knows the variances"""
    power_of_t: dict[str, float]
    """As a share of the ideal t-test"""
    superior_over_seeds: float
    """By a t-interval over seeds alone"""


class Worst(NamedTuple):
    """One figure over all cells."""

    value: float
    missed: int
    """Cells that miss the bar"""
    cells: int


def draw(design: Design, many: int, dice: np.random.Generator) -> tuple[Array, Array]:
    """Evaluations (many, seeds, hosts) of two policies that are equally good; a rule has one row."""
    shape = (many, design.seeds, design.hosts)
    policies = [
        dice.normal(0.0, design.rest, shape) + dice.normal(0.0, design.seed, (many, design.seeds, 1))
        for _ in range(design.learned)
    ]
    host = dice.normal(0.0, design.host, (many, 1, design.hosts))
    if design.learned == 1:
        return policies[0], host
    return policies[0] + host, policies[1]


def quantiles(freedom: Array) -> Array:
    """97.5 % points of Student's t; one degree of freedom is the least."""
    return np.asarray(np.interp(1 / np.maximum(freedom, 1.0), INVERSES, QUANTILES))


def measure(design: Design, many: int, margin: float, dice: np.random.Generator) -> Cell:
    """Simulate one cell."""
    left, right = draw(design, many, dice)
    mean, error, freedom = crossed(left, right)
    half = quantiles(freedom) * error
    worse, equal = draw(design, many, dice)
    lower, lower_error, lower_freedom = crossed(worse - margin, equal)

    known = math.sqrt(design.variance)
    ideal = known * np.sqrt(dice.chisquare(design.freedom, many) / design.freedom) * t_quantile(design.freedom)
    power, power_of_t = {}, {}
    for wanted in POWERS:
        effect = known * (NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(wanted))
        found = float((mean + effect > half).mean())
        power[str(wanted)] = found / wanted
        power_of_t[str(wanted)] = found / float((mean + effect > ideal).mean())
    return Cell(
        superior=_percent(mean > half),
        not_worse=_percent(lower - quantiles(lower_freedom) * lower_error > -margin),
        coverage=_percent(np.abs(mean) <= half),
        power=power,
        power_of_t=power_of_t,
        superior_over_seeds=_percent(mean > _half_over_seeds(left, right)),
    )


def _percent(found: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> float:
    return 100 * float(found.mean())


def _half_over_seeds(left: Array, right: Array) -> Array:
    """Half the t-interval over seeds, of equal numbers."""
    parts = [rows.mean(-1) for rows in (left, right) if rows.shape[-2] > 1]
    error = np.sqrt(sum(part.var(-1, ddof=1) / part.shape[-1] for part in parts))
    return np.asarray(t_quantile(sum(part.shape[-1] - 1 for part in parts)) * error)


def judge(cells: dict[Design, Cell]) -> dict[str, Worst]:
    """The worst of each figure, and the number of cells that miss its bar."""
    found = list(cells.values())
    coverage = [cell.coverage for cell in found]
    powers = {
        f"{name}_at_{wanted}": [getattr(cell, name)[wanted] for cell in found]
        for name in ("power", "power_of_t")
        for wanted in map(str, POWERS)
    }
    superior, not_worse = [cell.superior for cell in found], [cell.not_worse for cell in found]
    return {
        "superior": _worst(max(superior), [value > BARS["superior"] for value in superior]),
        "not_worse": _worst(max(not_worse), [value > BARS["not_worse"] for value in not_worse]),
        "least_coverage": _worst(min(coverage), [value < BARS["least_coverage"] for value in coverage]),
        "most_coverage": _worst(max(coverage), [value > BARS["most_coverage"] for value in coverage]),
        **{name: _worst(min(each), [value < BARS["least_power"] for value in each]) for name, each in powers.items()},
    }


def _worst(value: float, missed: list[bool]) -> Worst:
    return Worst(value, sum(missed), len(missed))


def main() -> None:
    """Simulate all cells, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=10_000, help="per cell")
    parser.add_argument("--seeds", type=int, default=5, help="training seeds")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--margin", type=float, default=MARGIN, help="points for `not worse`")
    parser.add_argument("--seed", type=int, default=0, help="of the simulations")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    dice = np.random.default_rng(arguments.seed)
    deviations = itertools.product((1, 2), HOST_DEVIATIONS, SEED_DEVIATIONS, REST_DEVIATIONS)
    designs = [Design(*each, arguments.seeds, arguments.hosts) for each in deviations]
    cells = {design: measure(design, arguments.simulations, arguments.margin, dice) for design in designs}

    at = str(POWERS[0])
    print_table(
        f"{arguments.seeds} training seeds × {arguments.hosts} hosts, {arguments.simulations:,} simulations per cell; "
        f"deviations in points; %; power at an effect that a test which knows the variances finds in {at}, as a share",
        ["learned", "host", "seed", "rest", "superior", "not worse", "coverage", "power", "of ideal t", "seeds alone"],
        [
            [
                *(str(value) for value in design[:4]), f"{cell.superior:.2f}", f"{cell.not_worse:.2f}",
                f"{cell.coverage:.2f}", f"{cell.power[at]:.3f}", f"{cell.power_of_t[at]:.3f}",
                f"{cell.superior_over_seeds:.1f}",
            ]
            for design, cell in cells.items()
        ],
    )  # fmt: skip
    verdicts = judge(cells)
    for name, verdict in verdicts.items():
        print(f"{name}: worst {verdict.value:.3f}, {verdict.missed} of {verdict.cells} cells miss the bar")
    worst = {name: verdict._asdict() for name, verdict in verdicts.items()}
    settings = {name: getattr(arguments, name) for name in ("simulations", "seeds", "hosts", "margin", "seed")}
    rows = [{**design._asdict(), "freedom": design.freedom, **asdict(cell)} for design, cell in cells.items()]
    path = write_result("crossed_statistics", {**settings, "bars": BARS, "worst": worst, "cells": rows}, arguments.out)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
