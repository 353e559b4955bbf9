"""Paired differences: intervals, p-values, Holm's adjustment."""

import math

import numpy as np
import pytest
from scipy import stats

from esper.leyline import BadValueError
from esper.leyline.numbers import t_quantile
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import compare, compare_all, holm


def result(objective: list[float]) -> Result:
    """One policy on some hosts."""
    n = len(objective)
    return Result(objective, [50.0] * n, [50.0] * n, [0] * n, [[]] * n)


def test_interval_over_training_seeds() -> None:
    """By hand: per seed the mean difference over hosts is 1, 2, 3, 4, 5; mean 3, error √2.5/√5 = 0.7071, t = 2.776."""
    mine = [[1.0 + seed, 1.0 + seed] for seed in range(5)]
    found = compare(mine, [[0.0, 0.0]])
    assert found.mean == pytest.approx(3.0)
    assert (found.low, found.high) == pytest.approx((3 - 2.776 * math.sqrt(0.5), 3 + 2.776 * math.sqrt(0.5)), rel=1e-3)
    assert found.seeds == 5
    assert found.bootstrap_low < 3.0 < found.bootstrap_high


def test_p_values_are_students() -> None:
    """Against scipy's."""
    dice = np.random.default_rng(0)
    for seeds in (2, 3, 5, 12, 40):
        gaps = dice.normal(0.4, 1.0, (seeds, 7))
        found = compare(gaps.tolist(), [[0.0] * 7])
        wanted = stats.ttest_1samp(gaps.mean(1), 0.0)
        assert found.p == pytest.approx(float(wanted.pvalue), rel=1e-4, abs=1e-7)


def test_hosts_are_paired() -> None:
    """What is common to both policies on a host cancels."""
    hosts = np.random.default_rng(1).normal(0, 30, 50)
    found = compare([(hosts + 1).tolist()], [hosts.tolist()])
    assert found.mean == pytest.approx(1.0)
    assert found.high - found.low < 1e-9


def test_seeds_are_crossed_with_a_rule_that_has_none() -> None:
    """Each training seed is compared with the rule on the same hosts."""
    found = compare([[3.0, 5.0], [7.0, 9.0]], [[1.0, 1.0]])
    assert found.mean == pytest.approx(5.0)


def test_two_learned_policies_are_not_paired_by_the_order_of_their_seeds() -> None:
    """Welch's interval, whatever the numbers of seeds: against scipy's p, and the same for any order."""
    dice = np.random.default_rng(2)
    left, right = dice.normal(1, 1, (5, 6)), dice.normal(0, 2, (7, 6))
    found = compare(left.tolist(), right.tolist())
    assert found.p == pytest.approx(
        float(stats.ttest_ind(left.mean(1), right.mean(1), equal_var=False).pvalue), rel=1e-3
    )
    other = compare(left[::-1].tolist(), right.tolist())
    assert (found.mean, found.low, found.high) == pytest.approx((other.mean, other.low, other.high))


@pytest.mark.parametrize("freedom", [1, 2, 4, 15, 16, 63])
def test_quantiles_are_students(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(float(stats.t.ppf(0.975, freedom)), rel=1e-3)


def test_one_run_beside_many_is_no_claim() -> None:
    """Five seeds of the other do not make up for it."""
    many = [result([0.0, 0.1 * seed]) for seed in range(5)]
    (found,) = compare_all({"runs/one": [result([10.0, 10.0])], "a+b+c+d+e": many})
    assert not found.superior


def test_holm() -> None:
    """By hand: 0.01 × 3, then 0.02 × 2 = 0.04, then 0.9; never below an earlier one."""
    assert holm([0.02, 0.9, 0.01]) == pytest.approx([0.04, 0.9, 0.03])
    assert holm([0.01, 0.011, 0.012]) == pytest.approx([0.03, 0.03, 0.03])
    assert holm([]) == []


def test_a_claim_needs_five_seeds() -> None:
    """Large and certain, but from four seeds: a report."""
    for seeds, superior in ((4, False), (5, True)):
        runs = [result([10.0 + 0.1 * seed, 11.0]) for seed in range(seeds)]
        (found,) = compare_all({"runs/a+runs/b": runs, "wait": [result([0.0, 0.0])]})
        assert (found.policy, found.against, found.superior) == ("runs/a+runs/b", "wait", superior)
        assert found.adjusted_p < 0.05


def test_a_policy_is_paired_with_its_own_control() -> None:
    """Seed by seed: what a training run and its retrained hosts share cancels. By hand: gaps 1, 1, 1, 1, 2; mean 1.2,
    error √0.2/√5 = 0.2, t = 2.776."""
    mine = [[10.0 * seed, 10.0 * seed] for seed in range(5)]
    theirs = [[10.0 * seed - (2 if seed == 4 else 1)] * 2 for seed in range(5)]
    found = compare(mine, theirs, paired=True)
    assert (found.mean, found.low) == pytest.approx((1.2, 1.2 - 2.776 * 0.2), rel=1e-3)
    assert 0.9 < found.bootstrap_low < found.bootstrap_high < 1.7
    assert compare(mine, theirs).low < -10, "as strangers they could be anything"
    results = {"a+b+c+d+e": [result(row) for row in mine], "static:a+b+c+d+e": [result(row) for row in theirs]}
    assert compare_all(results)[0].difference == found
    with pytest.raises(BadValueError, match="5 and 4 training seeds"):
        compare(mine, theirs[:4], paired=True)


@pytest.mark.parametrize(
    ("seeds", "margin", "not_worse"), [(5, 1.0, True), (5, 0.6, False), (4, 1.0, False), (4, 50.0, False)]
)
def test_not_worse_by_a_margin(seeds: int, margin: float, not_worse: bool) -> None:
    """The lower end must lie above −margin, with five training seeds. By hand, five: per seed −0.4, −0.2, 0, 0.2, 0.4;
    mean 0, error √0.1/√5 = 0.1414, lower end −0.393; so moved by −0.3, −0.693."""
    runs = [result([0.2 * (seed - 2) - 0.3] * 2) for seed in range(seeds)]
    (found,) = compare_all({"+".join("abcde"[:seeds]): runs, "wait": [result([0.0, 0.0])]}, margin)
    assert (found.not_worse, found.superior, found.margin) == (not_worse, False, margin)
    assert found.enough_seeds == (seeds == 5)


def test_rules_alone_claim_nothing() -> None:
    """Their unit is the host: a report."""
    (found,) = compare_all({"heuristic": [result([5.0, 5.1, 5.2])], "wait": [result([0.0, 0.0, 0.0])]})
    assert found.adjusted_p < 0.05
    assert not (found.superior or found.not_worse or found.enough_seeds)
