"""The model behind the search of plans: what it learns from trials, and that it needs half of the episodes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from simic.tuning.plan_worlds import WORLDS

from esper.leyline import BadValueError
from esper.simic.evaluation.yardsticks import extensions
from esper.simic.tuning import Search, SearchMethod, search_schedule
from esper.simic.tuning.plan_model import PlanModel, centred
from esper.simic.tuning.schedule import HOSTS, PLANS, TWO_SEEDS, deal
from esper.tamiyo.policies import Plan, PlannedSeed
from esper.tolaria import get_task

DIGITS = get_task("digits_blind")
ONE = PlannedSeed("r1c0", "depthwise", 0)
TWO = PlannedSeed("r1c1", "norm", 5)


def test_centring_by_hand() -> None:
    """Three rows on one host: the share is 1 − 1/√(1 + 3) = 1/2 of the mean 2, so 1 less each. One row on another
    host: 1 − 1/√2 of itself goes."""
    rows = np.array([[1.0], [2.0], [3.0], [8.0]])
    found = centred(rows, np.array([5, 5, 5, 2]))
    assert found[:, 0].tolist() == pytest.approx([0.0, 1.0, 2.0, 8 / math.sqrt(2)])


def test_centring_makes_noise_independent() -> None:
    """Noise with a common part of the host, variance 1 each: uncorrelated afterwards, still with variance 1."""
    dice = np.random.default_rng(0)
    rows = np.repeat(dice.normal(size=(20_000, 1)), 4, 1) + dice.normal(size=(20_000, 4))
    found = centred(rows.reshape(-1, 1), np.repeat(np.arange(20_000), 4)).reshape(-1, 4)
    assert np.cov(found.T) == pytest.approx(np.eye(4), abs=0.04)


def test_terms_of_a_plan() -> None:
    """By hand: five per seed, two per pair; the order of seeds makes no difference."""
    model = PlanModel(DIGITS)
    both = model.design([Plan((ONE, TWO)), Plan((TWO, ONE))])
    assert both[0].sum() == 12
    assert (both[0] == both[1]).all()
    assert model.design([Plan()]).sum() == 0
    sizes = {name: int(chosen.sum()) for name, chosen in model.groups.items()}
    cells = len({(plan.seeds[0].slot, plan.seeds[0].blueprint) for plan in extensions(Plan(), DIGITS)})
    assert (sizes["slot"], sizes["slot at time"], sizes["pair of slots"]) == (3, 9, 3)
    assert (sizes["cell"], sizes["cell at time"]) == (cells, 3 * cells)


def test_rent_is_known() -> None:
    """64 + 24 parameters on a host of 390: 2 · log2(1 + 88/390)."""
    model = PlanModel(DIGITS)
    (found,) = model.rents([Plan((ONE, TWO))])
    assert found == pytest.approx(2 * math.log2(1 + 88 / 390))
    nothing = np.zeros(len(model.number_of))
    assert model.objectives([Plan((ONE, TWO))], nothing)[0] == pytest.approx(-found)


def trials_of(
    worth: dict[PlannedSeed, float], plans: Sequence[Plan], pair: float = 0.0
) -> dict[Plan, dict[int, float]]:
    """Noiseless objectives, each plan on ten hosts."""
    return {
        plan: dict.fromkeys(range(10), sum(worth.get(seed, 0.0) for seed in plan.seeds) + pair * (len(plan.seeds) == 2))
        for plan in plans
    }


def test_what_was_seen_is_predicted_and_combined() -> None:
    """Seeds of 20 and 10 points alone; together they are worth what their sum says, unless a pair term was seen."""
    model, worth = PlanModel(DIGITS), {ONE: 20.0, TWO: 10.0}
    singles, both = extensions(Plan(), DIGITS), Plan((ONE, TWO))
    apart = model.fit(trials_of(worth, singles))
    assert model.objectives([Plan((ONE,)), Plan((TWO,))], apart.mean) == pytest.approx([20.0, 10.0], abs=1.0)
    assert model.objectives([both], apart.mean)[0] == pytest.approx(30.0, abs=2.0)
    best = model.best(apart.mean).seeds
    assert best[:2] == (ONE, TWO), "the best first"
    together = model.fit(trials_of(worth, [*singles, both], pair=-25.0))
    assert model.objectives([both], together.mean)[0] == pytest.approx(5.0, abs=1.0)
    assert model.best(together.mean).seeds[0] == ONE
    assert TWO not in model.best(together.mean).seeds


def test_neighbours_of_a_good_cell_are_expected_to_be_good() -> None:
    """Cells of one slot were seen to gain: an unseen one of that slot is expected to gain more than one of another."""
    model = PlanModel(DIGITS)
    seen = [plan for plan in extensions(Plan(), DIGITS) if plan.seeds[0].blueprint not in ("conv_small", "norm")]
    worth = {plan.seeds[0]: 20.0 for plan in seen if plan.seeds[0].slot == "r1c1"}
    mean = model.fit(trials_of(worth, seen)).mean
    here, there = (Plan((PlannedSeed(slot, "conv_small", 0),)) for slot in ("r1c1", "r1c2"))
    assert model.objectives([here], mean)[0] > 8 > 2 > model.objectives([there], mean)[0]


def test_draws_differ_where_little_is_known() -> None:
    """The spread of a cell that was tried on ten hosts is far below that of one that was never tried."""
    model, dice = PlanModel(DIGITS), np.random.default_rng(3)
    noisy = {
        plan: {host: float(dice.normal(0, 3)) for host in range(10)}
        for plan in extensions(Plan(), DIGITS)
        if plan.seeds[0].blueprint != "conv_small"
    }
    posterior = model.fit(noisy)
    assert posterior.noise == pytest.approx(9.0, rel=0.3)
    plans = [Plan((PlannedSeed("r1c0", name, 0),)) for name in ("norm", "conv_small")]
    draws = np.array([model.objectives(plans, posterior.draw(dice)) for _ in range(200)])
    tried, untried = draws.std(0)
    assert 0 < tried < untried


def test_random_plans_cover_all_seeds() -> None:
    """A full deal has every cell and time once as its first seed; about a quarter have a second."""
    dealt, singles = deal(DIGITS, Search[Plan](lambda *_: [], 16, 0).rng("deal")), extensions(Plan(), DIGITS)
    plans = [next(dealt) for _ in range(10 * len(singles))]
    for first in range(0, len(plans), len(singles)):
        assert {plan.seeds[:1] for plan in plans[first : first + len(singles)]} == {plan.seeds for plan in singles}
    assert fmean(len(plan.seeds) == 2 for plan in plans) == pytest.approx(TWO_SEEDS, abs=0.06)


def test_batches_fill_a_fleet_and_hosts_have_plans_of_their_own() -> None:
    """Seven plans and a control on each of eight hosts; no plan twice on a host, no host twice."""
    shapes: list[tuple[int, int]] = []
    world = WORLDS["blind"](0)

    def evaluate(lineups: Sequence[Sequence[Plan]], hosts: Sequence[int]) -> list[list[float]]:
        shapes.append((len(lineups), len(lineups[0])))
        assert all(len({frozenset(plan.seeds) for plan in lineup}) == len(lineups[0]) for lineup in lineups)
        assert shapes[1:] or lineups[0] != lineups[1]
        return world(lineups, hosts)

    search = Search[Plan](evaluate, 480, 0)
    search_schedule(search, DIGITS)
    assert shapes.count((HOSTS, PLANS)) >= 5
    assert (HOSTS * (PLANS + 1), shapes[-1][1]) == (64, 3)
    assert {trial.stage for trial in search.log} == {"random", "proposed", "final"}


def test_a_task_with_a_single_plan() -> None:
    """It goes to the final at once; a task without any is refused."""
    single = replace(DIGITS, steps=1, slot_ids=("r1c0",), budget=12)
    search = Search[Plan](lambda lineups, hosts: [[1.0] * len(lineup) for lineup in lineups], 30, 0)
    plan, mean = search_schedule(search, single)
    assert (len(plan.seeds), mean) == (1, 1.0)
    with pytest.raises(BadValueError, match="its budget of 5 parameters allows no seed"):
        search_schedule(search, replace(DIGITS, budget=5))


def mean_regret(name: str, method: SearchMethod, episodes: int, worlds: int) -> float:
    """Points that the chosen plans lack to the best, over worlds."""
    found = []
    for number in range(worlds):
        world = WORLDS[name](number)
        plan, _ = search_schedule(Search[Plan](world, episodes, number), world.task, method)
        found.append(world.regret(plan))
    return fmean(found)


@pytest.mark.parametrize(
    ("name", "worlds"),
    [pytest.param(name, worlds, marks=[pytest.mark.slow] * (worlds > 15)) for name in WORLDS for worlds in (15, 60)],
)
def test_half_the_episodes_are_enough(name: str, worlds: int) -> None:
    """Against successive halving with all of them, on the same worlds."""
    halving, model = mean_regret(name, "halving", 256, worlds), mean_regret(name, "model", 128, worlds)
    assert model < halving
