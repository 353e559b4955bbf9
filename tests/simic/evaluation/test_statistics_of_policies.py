"""Differences over seeds × hosts: intervals, p-values, Holm's adjustment."""

import math

import numpy as np
import pytest
from scipy import stats

from esper.leyline import BadValueError
from esper.leyline.numbers import t_quantile
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import Array, compare, compare_all, crossed, holm


def result(objective: list[float]) -> Result:
    """One policy on some hosts."""
    n = len(objective)
    return Result(objective, [50.0] * n, [50.0] * n, [0] * n, [[]] * n)


def table(seed: float, host: float) -> Array:
    """Three seeds (−seed, 0, seed), four hosts (−host, −host, host, host), and ±1 in a corner as the rest; mean 7."""
    rest = np.array([[1.0, -1.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    rows: Array = 7 + np.array([[-seed], [0.0], [seed]]) + np.array([-host, -host, host, host]) + rest
    return rows


NOTHING = np.zeros((1, 4))


def test_variance_from_seeds_and_hosts() -> None:
    """By hand. Mean squares: seeds 4·(2² + 2²)/2 = 16, hosts 3·(4·3²)/3 = 36, rest 4/6; divided by 12 values 4/3, 3
    and 1/18. Variance 4/3 + 3 − 1/18 = 77/18; of it seeds are 24/77 and hosts 54/77. Degrees of freedom (77/18)² =
    18.2994 over the sum of (4/3)²/2 · (1 + 3·(53/77)/2) = 1.8066, 3²/3 · (1 + 3·(23/77)/3) = 3.8961 and
    (1/18)²/6 = 0.0005: 3.2086."""
    mean, error, freedom = crossed(table(2, 3), NOTHING)
    assert (mean, error**2, freedom) == pytest.approx((7, 77 / 18, 3.2086), rel=1e-4)
    found = compare(table(2, 3).tolist(), NOTHING.tolist())
    half = float(stats.t.ppf(0.975, 3.2086)) * math.sqrt(77 / 18)
    assert (found.mean, found.low, found.high) == pytest.approx((7, 7 - half, 7 + half), rel=1e-3)
    assert found.p == pytest.approx(2 * float(stats.t.sf(7 / math.sqrt(77 / 18), 3.2086)), rel=1e-4)


@pytest.mark.parametrize(
    ("seed", "host", "variance", "freedom"),
    [
        (2.0, 0.0, 16 / 12, 2.0),  # hosts' mean square is 0, below the rest's 2/3: seeds alone, 3 − 1
        (0.0, 3.0, 36 / 12, 3.0),  # seeds' is: hosts alone, 4 − 1
        (0.0, 0.0, 1 / 18, 6.0),  # both are: the rest alone, (3 − 1)·(4 − 1)
    ],
)
def test_a_part_that_would_be_negative_is_left_out(seed: float, host: float, variance: float, freedom: float) -> None:
    found = crossed(table(seed, host), NOTHING)
    assert (found.mean, found.error**2, found.freedom) == pytest.approx((7, variance, freedom))


def test_seed_parts_of_two_learned_policies_add_up() -> None:
    """By hand. The other: two seeds (−1, 1), no hosts, ±1 in a corner. Its mean squares are 4·2/1 = 8 and 4/3, divided
    by 8 values 1 and 1/6. The host part is that of the difference, 3. Variance (4/3 − 1/18) + (1 − 1/6) + 3 = 46/9.
    Of it seeds are 21/46 and hosts 27/46. Degrees of freedom (46/9)² = 26.1235 over the sum of (4/3)²/2 · (1 +
    3·(25/46)/2) = 1.6135, 1²/1 · (1 + 3·(25/46)/1) = 2.6304, 3²/3 · (1 + 3·(19/46)/3) = 4.2391, (1/18)²/6 = 0.0005
    and (1/6)²/3 = 0.0093: 3.0759."""
    other = np.array([[-1.0], [1.0]]) + np.array([[1.0, -1.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0]])
    mean, error, freedom = crossed(table(2, 3), other)
    assert (mean, error**2, freedom) == pytest.approx((7, 46 / 9, 3.0759), rel=1e-4)
    other += np.array([-3, -3, 3, 3])  # what hosts do to both cancels: without a host part the rests remain
    assert crossed(table(2, 3), other).error ** 2 == pytest.approx(4 / 3 + 1)


def test_many_comparisons_at_once() -> None:
    """Along leading axes, as one by one; the other way round all is mirrored."""
    dice = np.random.default_rng(5)
    left, right = dice.normal(size=(6, 4, 9)), dice.normal(size=(6, 3, 9))
    together, mirrored = crossed(left, right), crossed(right, left)
    for index in range(6):
        np.testing.assert_allclose([part[index] for part in together], crossed(left[index], right[index]))
    np.testing.assert_allclose(mirrored.mean, -together.mean)
    np.testing.assert_allclose(mirrored[1:], together[1:])


def test_two_seeds_leave_a_degree_of_freedom() -> None:
    """Student's t is not computed below one, where the formula sometimes ends with two seeds."""
    rows = np.random.default_rng(6).normal(size=(200, 2, 3))
    assert float(crossed(rows, np.zeros((200, 1, 3))).freedom.min()) == 1.0


@pytest.mark.parametrize("learned", [1, 2])
@pytest.mark.parametrize(("host", "seed", "rest"), [(9.0, 0.2, 1.0), (2.5, 2.0, 1.0), (0.0, 0.2, 3.0), (0.0, 0.0, 1.0)])
def test_intervals_cover_new_seeds_and_hosts(host: float, seed: float, rest: float, learned: int) -> None:
    """True difference 0, one or both policies with five seeds, 64 hosts: 95 % of the intervals hold it, and never
    fewer than 94 (standard error of 6,000 simulations 0.3)."""
    dice, many = np.random.default_rng(3), 6000
    left, right = (dice.normal(0, seed, (many, 5, 1)) + dice.normal(0, rest, (many, 5, 64)) for _ in range(2))
    left += dice.normal(0, host, (many, 1, 64))
    mean, error, freedom = crossed(left, right if learned == 2 else np.zeros((many, 1, 64)))
    covered = float((np.abs(mean) <= stats.t.ppf(0.975, freedom) * error).mean())
    assert 0.94 < covered < 0.985


def test_one_host_has_no_interval() -> None:
    """It says nothing about others, however many seeds there are."""
    found = compare([[1.0], [1.1], [1.2]], [[0.0]])
    assert (found.mean, found.low, found.high, found.p) == pytest.approx((1.1, -math.inf, math.inf, 1.0))


def test_hosts_on_which_nothing_ever_differs() -> None:
    """No variance at all: the interval is a point."""
    found = compare([[2.0, 2.0]] * 5, [[2.0, 2.0]])
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_interval_over_training_seeds() -> None:
    """Hosts agree, so seeds alone count. By hand: per seed the mean difference over hosts is 1, 2, 3, 4, 5; mean 3,
    error √2.5/√5 = 0.7071, t = 2.776."""
    mine = [[1.0 + seed, 1.0 + seed] for seed in range(5)]
    found = compare(mine, [[0.0, 0.0]])
    assert found.mean == pytest.approx(3.0)
    assert (found.low, found.high) == pytest.approx((3 - 2.776 * math.sqrt(0.5), 3 + 2.776 * math.sqrt(0.5)), rel=1e-3)
    assert found.seeds == 5
    assert found.bootstrap_low < 3.0 < found.bootstrap_high


def test_rules_and_single_seeds_are_compared_over_hosts() -> None:
    """Against scipy's t-test."""
    dice = np.random.default_rng(0)
    for hosts in (2, 3, 5, 12, 40):
        gaps = dice.normal(0.4, 1.0, hosts)
        found = compare([gaps.tolist()], [[0.0] * hosts])
        wanted = stats.ttest_1samp(gaps, 0.0)
        assert found.p == pytest.approx(float(wanted.pvalue), rel=1e-4, abs=1e-7)
        assert (found.low, found.high) == pytest.approx(tuple(wanted.confidence_interval(0.95)), rel=1e-4)


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
    """The same for any order, whatever the numbers of seeds."""
    dice = np.random.default_rng(2)
    left, right = dice.normal(1, 1, (5, 6)), dice.normal(0, 2, (7, 6))
    found, other = compare(left.tolist(), right.tolist()), compare(left[::-1].tolist(), right.tolist())
    assert (found.mean, found.low, found.high) == pytest.approx((other.mean, other.low, other.high))
    same = compare(left.tolist(), left.tolist())
    assert same.mean == 0 < same.high, "nor is a policy paired with another of equal figures"


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
