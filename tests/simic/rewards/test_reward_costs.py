"""Costs of the shaped family: bounded, never positive."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simic.rewards.trajectories import ADVANCE, FOSSILIZE, PRUNE, SET_ALPHA, WAIT, Move, play, slot_view

from esper.leyline import LifecycleOp, SeedStage
from esper.simic.rewards import DetectorLimits, RewardConfig, RewardInputs, families
from esper.tamiyo.signals import SlotView

CONFIG = RewardConfig(family="shaped")
IDLE = play(lambda host: Move(), 1)[0]


def one_step(before: SlotView, op: LifecycleOp = WAIT, after: SlotView | None = None, slot: int = 0) -> RewardInputs:
    """Of one env."""
    return IDLE._replace(
        before=before,
        after=before if after is None else after,
        op=torch.tensor([int(op)]),
        slot=torch.tensor([slot]),
        seed_parameters=torch.full_like(before.stage, 500),
    )


def held(age: int = 0, contribution: float | None = 2.0, steps: int = 0) -> SlotView:
    """A seed in slot 0."""
    stages = [SeedStage.HOLDING, SeedStage.DORMANT]
    return slot_view(stages, [1, 0], [contribution, None], age=[age, 0], steps_in_stage=[steps, 0])


def ratio_penalty(contribution: float, gain: float, limits: DetectorLimits) -> float:
    """Of one seed."""
    inputs = one_step(held(contribution=contribution))._replace(gain=torch.tensor([gain], dtype=torch.float64))
    return float(families.ratio_cost(RewardConfig(family="shaped", limits=limits), inputs))


@pytest.mark.requirement(2)
@given(
    contribution=st.floats(-1e6, 1e6),
    gain=st.sampled_from([0.0, 1e-12, -1e-12, 1e-300, 5e-324, -1.0, 1.0, 1e6, -1e6]),
    threshold=st.sampled_from([0.0, 1e-12, 1.0, 100.0]),
    limit=st.sampled_from([0.0, 1e-12, 5.0]),
)
def test_ratio_penalty_is_safe(contribution: float, gain: float, threshold: float, limit: float) -> None:
    """Finite, never positive and bounded for any improvement and threshold, including 0."""
    penalty = ratio_penalty(contribution, gain, DetectorLimits(threshold, limit))
    assert math.isfinite(penalty)
    assert -CONFIG.ratio_cap <= penalty <= 0


def test_ratio_penalty_by_hand() -> None:
    """Contribution 6, gain 0.8: 2 points above 5 · 0.8, a fifth of the range: 0.06. Nothing below the limits."""
    assert ratio_penalty(6.0, 0.8, DetectorLimits()) == pytest.approx(-0.06)
    assert ratio_penalty(6.0, 1.3, DetectorLimits()) == 0
    assert ratio_penalty(0.9, -5.0, DetectorLimits()) == 0
    assert ratio_penalty(90.0, 0.0, DetectorLimits()) == pytest.approx(-0.3)


@pytest.mark.requirement(17)
@pytest.mark.parametrize("op", [WAIT, SET_ALPHA, ADVANCE], ids=lambda op: op.name)
def test_indecision_is_linear_and_bounded(op: LifecycleOp) -> None:
    """Each of 20 late steps adds at most 0.05, up to 0.3, for every op that delays."""
    ages = range(CONFIG.patience, CONFIG.patience + 21)
    paid = [-float(families.indecision_cost(CONFIG, one_step(held(age), op))) for age in ages]
    assert paid[:8] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.3])
    assert max(later - earlier for earlier, later in itertools.pairwise(paid)) <= 0.05 + 1e-12
    assert max(paid) == pytest.approx(0.3)


@pytest.mark.requirement(17)
@pytest.mark.parametrize("op", [FOSSILIZE, PRUNE], ids=lambda op: op.name)
def test_decisions_end_it(op: LifecycleOp) -> None:
    """A decision ends the cost only for its own slot."""
    assert float(families.indecision_cost(CONFIG, one_step(held(40), op))) == 0
    assert float(families.indecision_cost(CONFIG, one_step(held(40), op, slot=1))) == pytest.approx(-0.3)


def test_indecision_counts_every_slot() -> None:
    """All slots, not only the one that an action is about; fossils and seeds in training are decided or not yet due."""
    stages = [SeedStage.HOLDING, SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.TRAINING]
    view = slot_view(stages, [1, 0.5, 1, 0], [1.0, 1.0, 1.0, None], age=[40] * 4)
    assert float(families.indecision_cost(CONFIG, one_step(view))) == pytest.approx(-0.6)
    leaving = view._replace(alpha_target=torch.tensor([[1.0, 0, 1, 1]]), ramping=torch.tensor([[False, True] * 2]))
    assert float(families.indecision_cost(CONFIG, one_step(leaving))) == pytest.approx(-0.3)


def blending_seed(steps: int, contribution: float | None, alpha: float = 0.5) -> RewardInputs:
    """One seed on its way in."""
    view = slot_view([SeedStage.BLENDING], [alpha], [contribution], steps_in_stage=[steps], ramping=[True])
    return one_step(view)


@pytest.mark.requirement(17)
def test_harmful_blending_is_linear_and_bounded() -> None:
    """0.05 per step up to 0.3; nothing for a seed that helps, is silent or unmeasured."""
    paid = [float(families.blending_cost(CONFIG, blending_seed(steps, -1.0))) for steps in range(20)]
    assert paid == pytest.approx([-min(0.05 * steps, 0.3) for steps in range(20)])
    for inputs in (blending_seed(9, 1.0), blending_seed(9, None), blending_seed(9, -1.0, alpha=0.0)):
        assert float(families.blending_cost(CONFIG, inputs)) == 0


@pytest.mark.requirement(23)
@pytest.mark.parametrize("contribution", [1e6, 1e300, 3.0, 0.0, -1e6, None])
@pytest.mark.parametrize("age", [0, 4, 5, 50])
def test_prune_shaping_is_bounded(contribution: float | None, age: int) -> None:
    """A contribution of 1e6 costs at most the stated bound, and pruning never pays."""
    paid = float(families.prune_cost(CONFIG, one_step(held(age, contribution), PRUNE)))
    assert -CONFIG.prune_bound <= paid <= 0
    useful = min(0.05 * max(contribution or 0.0, 0.0), 0.9)
    assert paid == pytest.approx(-useful - 0.3 * max(5 - age, 0))
    assert float(families.prune_cost(CONFIG, one_step(held(age, contribution), WAIT))) == 0


def test_shock_by_hand() -> None:
    """Alpha 0 → 1 of 500 on 1000 parameters: 0.2 · 0.5 = 0.1 at once, a third of it in three steps; at most 1."""

    def jump(start: float, end: float, parameters: int = 500) -> float:
        views = [slot_view([SeedStage.BLENDING], [alpha], [None]) for alpha in (start, end)]
        inputs = one_step(views[0], after=views[1])._replace(seed_parameters=torch.tensor([[parameters]]))
        return float(families.shock_cost(CONFIG, inputs))

    assert jump(0, 1) == jump(1, 0) == pytest.approx(-0.1)
    assert sum(jump(i / 3, (i + 1) / 3) for i in range(3)) == pytest.approx(-0.1 / 3)
    assert jump(0, 1, 10**6) == -1
    assert jump(0.7, 0.7) == 0


@pytest.mark.requirement(25)
@pytest.mark.parametrize("op", LifecycleOp, ids=lambda op: op.name)
def test_ops_cost_what_the_table_says(op: LifecycleOp) -> None:
    """The charges come from the same settings."""
    assert float(families.op_cost(CONFIG, one_step(held(), op))) == -CONFIG.op_costs[op]
