"""One policy against another: what may be claimed."""

from dataclasses import dataclass

from esper.simic.training.jobs import base_of, is_learned
from esper.simic.training.results import Result
from esper.simic.training.statistics import Difference, compare, holm

CLAIM_SEEDS = 5
"""Training seeds below which a difference is a report and no claim."""
MARGIN = 1.0
"""Points by which a policy may be worse and still be called not worse."""


@dataclass(frozen=True)
class Compared:
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


def compare_all(results: dict[str, list[Result]], margin: float = MARGIN) -> list[Compared]:
    """Every learned policy against all others by objective: see `compare_rows`."""
    return compare_rows({name: [result.objective for result in found] for name, found in results.items()}, margin)


def compare_rows(rows: Rows, margin: float = MARGIN) -> list[Compared]:
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


def _claim(
    name: str, other: str, difference: Difference, adjusted_p: float, margin: float, seeds: list[int]
) -> Compared:
    """`seeds`: how many each learned policy of the two has."""
    enough = bool(seeds) and min(seeds) >= CLAIM_SEEDS
    return Compared(
        name,
        other,
        difference,
        adjusted_p,
        enough,
        enough and adjusted_p < 0.05 and difference.mean > 0,
        enough and difference.low > -margin,
        margin,
    )
