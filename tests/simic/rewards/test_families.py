"""Rewards by hand."""

import math
import random

import pytest
import torch
from simic.rewards.trajectories import (
    ADVANCE,
    FOSSILIZE,
    GERMINATE,
    PRUNE,
    Move,
    pay,
    play,
    random_script,
    slot_view,
    stack,
    steady,
)
from torch import Tensor

from esper.leyline import BadValueError, SeedStage, rent
from esper.simic.rewards import Family, RewardConfig, Rewarded, RewardInputs, compute_reward, relative_loss
from esper.simic.rewards.potentials import SHAPING, STAGE_POTENTIALS, credit, stage_potential, unexplained
from esper.tolaria import get_task

FAMILIES: tuple[Family, ...] = ("paired", "shaped", "simplified", "sparse", "minimal", "loss")
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def row(value: float) -> Tensor:
    """One env."""
    return torch.tensor([value], dtype=torch.float64)


@pytest.fixture
def step() -> RewardInputs:
    """One env with a fossil (1000 parameters, as many as the host) and a held seed (2000), in the middle."""
    stages, alphas = [SeedStage.FOSSILIZED, SeedStage.HOLDING, SeedStage.DORMANT], [1.0, 1.0, 0.0]
    view = slot_view(stages, alphas, [3.0, 1.0, None])
    return play(lambda host: Move(), 1)[0]._replace(
        potential=row(-1.0),
        before=view,
        after=view,
        gain=row(6.0),
        control_accuracy=row(70.0),
        acting_parameters=torch.tensor([3000]),
        fossil_parameters=torch.tensor([1000]),
        host_parameters=torch.tensor([1000]),
        terminal=torch.tensor([False]),
        objective_gain=row(5.0),
        loss=row(0.25),
        objective_loss=row(0.5),
    )


def total(config: RewardConfig, inputs: RewardInputs) -> float:
    """Of the only env."""
    return float(compute_reward(config, inputs).total)


def ended(inputs: RewardInputs) -> RewardInputs:
    """The same as the last step."""
    return inputs._replace(terminal=torch.tensor([True]))


def crashed(inputs: RewardInputs) -> RewardInputs:
    """The same, but its training fails."""
    return inputs._replace(panic=torch.tensor([True]), gain=row(math.nan), loss=row(math.nan))


def test_rent() -> None:
    """2 points per doubling: 1000 on 1000 is one, 3000 on 1000 are two. The same for numbers and tensors."""
    assert rent(torch.tensor([0, 1000, 3000]), torch.tensor([1000]), 2.0).tolist() == [0.0, 2.0, 4.0]
    assert float(rent(torch.tensor(700), torch.tensor(1000), 2.0)) == pytest.approx(rent(700, 1000))


def test_paired_by_hand(step: RewardInputs) -> None:
    """Φ(s) = −1. Φ(s') = 6 − 4 = 2. At the end Φ := 0 and the objective is 5 − 2 = 3."""
    config = RewardConfig(gamma=0.9)
    assert total(config, step) == pytest.approx(0.9 * 2 + 1)
    assert float(compute_reward(config, step).potential) == 2
    assert total(config, ended(step)) == pytest.approx(1 + 3)
    assert total(RewardConfig(shaping=0.0), step) == 0
    assert total(RewardConfig(shaping=0.0), ended(step)) == 3


def test_panic_by_hand(step: RewardInputs) -> None:
    """Penalty = −(70 − 10) − 4 − 5 = −69; reward = penalty − Φ(s) = −68."""
    assert total(RewardConfig(), crashed(step)) == -68
    assert total(RewardConfig(), crashed(ended(step))) == -68


@EACH_FAMILY
def test_a_panic_is_worse_than_ending_at_chance(step: RewardInputs, family: Family) -> None:
    """In every family, by the same formula, whatever acted and whatever had been committed."""
    for seed in range(20):
        rng = random.Random(seed)
        control, fossils = rng.uniform(5, 95), rng.randrange(5000)
        at_chance = step._replace(
            control_accuracy=row(control),
            gain=row(10 - control),
            objective_gain=row(10 - control),
            loss=row(1.0),
            objective_loss=row(1.0),
            fossil_parameters=torch.tensor([fossils]),
            acting_parameters=torch.tensor([fossils + rng.randrange(2) * 500]),
        )
        config = RewardConfig(family=family)
        assert total(config, crashed(at_chance)) < total(config, ended(at_chance))


def test_shaped_by_hand(step: RewardInputs) -> None:
    """Stages 0.3 · (6 + 5.5), credit 3 + 1 (less than the gain of 6), rent −4; no costs in an idle, young host."""
    rewarded = compute_reward(RewardConfig(family="shaped"), step)
    assert {name: float(level) for name, level in rewarded.levels.items()} == pytest.approx(
        {"stages": 3.45, "attribution": 4.0, "rent": -4.0}
    )
    assert float(rewarded.total) == pytest.approx(3.45 + 1)
    assert total(RewardConfig(family="shaped"), ended(step)) == pytest.approx(1 + 3)


def test_simplified_by_hand(step: RewardInputs) -> None:
    """Stages and gain; an op costs what it costs elsewhere; no rent."""
    config = RewardConfig(family="simplified")
    assert total(config, step) == pytest.approx(3.45 + 1)
    assert total(config, ended(step)) == pytest.approx(5 + 1)
    pruned = step._replace(op=torch.tensor([int(PRUNE)]), slot=torch.tensor([1]))
    assert total(config, pruned) == pytest.approx(3.45 + 1 - config.prune_cost)
    assert total(config, crashed(step)) == pytest.approx(-60 - 5 + 1)


def without_potential(inputs: RewardInputs) -> RewardInputs:
    """As a family without Φ would see it."""
    return inputs._replace(potential=row(0.0))


@pytest.mark.requirement(16)
@pytest.mark.parametrize("family", ["sparse", "minimal"])
def test_sparse_by_hand(step: RewardInputs, family: Family) -> None:
    """(75 − 2) / 100 at the end; the scale is a factor, inside and outside the clamp."""
    inputs = without_potential(step)
    one, more = RewardConfig(family=family), RewardConfig(family=family, sparse_scale=2.5)
    assert total(one, inputs) == 0
    assert total(one, ended(inputs)) == pytest.approx(0.73)
    for gain in (5.0, 900.0, -900.0):
        last = ended(inputs)._replace(objective_gain=row(gain))
        assert total(more, last) == 2.5 * total(one, last)
    assert total(one, ended(inputs)._replace(objective_gain=row(900.0))) == 1
    assert total(one, crashed(inputs)) == pytest.approx((10 - 4) / 100 - 0.05)
    assert total(more, crashed(inputs)) == pytest.approx(2.5 * total(one, crashed(inputs)))


def test_minimal_minds_early_pruning(step: RewardInputs) -> None:
    """A seed of age 2 is 3 steps short of 5: 3 · 0.3 points. `sparse` does not mind."""
    stages = [SeedStage.FOSSILIZED, SeedStage.TRAINING, SeedStage.DORMANT]
    view = slot_view(stages, [1, 0, 0], [3.0, None, None], age=[9, 2, 0])
    pruned = without_potential(step)._replace(op=torch.tensor([int(PRUNE)]), slot=torch.tensor([1]), before=view)
    assert total(RewardConfig(family="minimal"), pruned) == pytest.approx(-0.009)
    assert total(RewardConfig(family="minimal", sparse_scale=100.0), pruned) == pytest.approx(-0.9)
    assert total(RewardConfig(family="sparse"), pruned) == 0


def test_loss_by_hand(step: RewardInputs) -> None:
    """A quarter of the guess: 75 points; Φ(s') = 75 − 4. At the end half of it: 50 − 2."""
    config = RewardConfig(family="loss")
    assert total(config, step) == pytest.approx(71 + 1)
    assert total(config, ended(step)) == pytest.approx(48 + 1)
    assert total(config, ended(step)._replace(objective_loss=row(50.0))) == pytest.approx(-100 - 2 + 1)
    assert total(config, crashed(step)) == pytest.approx(-4 - 5 + 1)


@pytest.mark.requirement(24)
def test_loss_baselines_come_from_the_task() -> None:
    """A loss of ln 100 with 100 classes is worth 0, and likewise for any other task."""
    hundred = relative_loss(torch.tensor([math.log(100), 0.0, 2 * math.log(100)]), math.log(100))
    assert hundred.tolist() == pytest.approx([1.0, 0.0, 2.0])
    guess = get_task("digits_blind").random_guess_loss
    assert guess == pytest.approx(math.log(10))
    assert float(relative_loss(torch.tensor(guess, dtype=torch.float64), guess)) == 1
    with pytest.raises(BadValueError, match="random_guess_loss 0"):
        relative_loss(torch.ones(1), 0.0)


@pytest.mark.requirement(21)
@EACH_FAMILY
def test_parts_sum_to_the_total(family: Family) -> None:
    """The sum is exact; no part is missing or counted twice."""
    episodes = [play(random_script(random.Random(seed)), 15) for seed in range(8)]
    for rewarded in pay(RewardConfig(family=family), [stack(step) for step in zip(*episodes, strict=True)]):
        parts = rewarded.parts
        running = torch.zeros(8, dtype=torch.float64)
        for part in parts.values():
            assert part.shape == (8,) and part.isfinite().all()
            running = running + part
        assert running.equal(rewarded.total)
        share = rewarded.shaped_share
        assert ((share >= 0) & (share <= 1)).all()


@pytest.mark.requirement(21)
def test_shaped_share() -> None:
    """The share is taken by size, so it stays defined where the parts cancel or are all 0."""
    shaping, gain = torch.tensor([3.0, 2.0, 0.0, -2.0]), torch.tensor([1.0, -2.0, 0.0, 0.0])
    rewarded = Rewarded({SHAPING: shaping, "gain": gain}, gain, {})
    assert rewarded.total.tolist() == [4, 0, 0, -2]
    assert rewarded.shaped_share.tolist() == [0.75, 0.5, 0, 1]


def test_stage_potentials_grow_towards_the_fossil() -> None:
    """Every stage has one; advancing never costs; all slots count."""
    assert set(STAGE_POTENTIALS) == set(SeedStage)
    way = [STAGE_POTENTIALS[stage] for stage in list(SeedStage)[:6]]
    assert way == sorted(way) and len(set(way)) == 6
    assert float(stage_potential(torch.tensor([[5, 4, 0]]))) == 11.5
    assert float(stage_potential(torch.tensor([[0, 4, 5]]))) == 11.5


def test_credit_is_bounded_by_the_gain() -> None:
    """6 and 2 claimed of a gain of 4: half each. Harm counts in full. No gain, no credit."""
    view = slot_view([4, 4, 4], [1, 1, 1], [6.0, 2.0, -1.0])
    assert credit(view, row(4.0)).tolist() == [[3.0, 1.0, -1.0]]
    assert credit(view, row(9.0)).tolist() == [[6.0, 2.0, -1.0]]
    assert credit(view, row(-0.5)).tolist() == [[0.0, 0.0, -1.0]]
    nothing = slot_view([4, 4, 4], [1, 1, 1], [0.0, 0.0, 0.0])
    assert credit(nothing, row(0.0)).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.requirement(37)
def test_silent_seeds_are_not_measured(step: RewardInputs) -> None:
    """At alpha 0 there is no contribution and no proxy, even if one was recorded."""
    silent = slot_view([2, 0, 0], [0, 0, 0], [6.0, None, None])
    assert credit(silent, row(9.0)).tolist() == [[0.0, 0.0, 0.0]]
    assert float(unexplained(silent, row(9.0))) == 0
    unmeasured = slot_view([3, 4, 0], [0.5, 1, 0], [None, 2.0, None])
    assert float(unexplained(unmeasured, row(9.0))) == 7
    assert float(unexplained(unmeasured, row(1.0))) == 0
    # The proxy: 0.3 of the 4 points that the measured seed leaves of the gain of 6.
    rewarded = compute_reward(RewardConfig(family="shaped"), step._replace(after=unmeasured))
    assert float(rewarded.levels["attribution"]) == pytest.approx(2 + 0.3 * 4)


@pytest.mark.requirement(22)
def test_attribution_scales_as_a_whole(step: RewardInputs) -> None:
    """The proxy is a share of the main weight, so twice that weight is twice the level."""
    # The measured seed is credited with 2 of the gain of 6, the proxy explains the other 4: w·(2 + 0.3·4).
    half_measured = step._replace(after=slot_view([3, 4, 0], [0.5, 1, 0], [None, 2.0, None]))
    for weight in (0.0, 0.5, 1.0, 2.0):
        config = RewardConfig(family="shaped", attribution_weight=weight)
        assert float(compute_reward(config, half_measured).levels["attribution"]) == pytest.approx(weight * 3.2)


def test_an_episode_by_hand() -> None:
    """4 points for 100 of 1000 parameters, held from step 7 on: each reward is the change of gain − rent."""
    moves = {0: Move(GERMINATE, 0, steady(4.0)), 3: Move(ADVANCE), 8: Move(FOSSILIZE)}
    rewards = [float(r.total) for r in pay(RewardConfig(), play(lambda host: moves.get(host.step, Move()), 10))]
    tenth = 2 * math.log2(1.1)
    expected = [0, 0, 0, 4 / 3 - tenth, 4 / 3, 4 / 3, 0, 0, 0, 0]
    assert rewards == pytest.approx(expected)
    assert sum(rewards) == pytest.approx(4 - tenth)
