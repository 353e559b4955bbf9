"""The parts of PPO's loss, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.agent.losses import LOG_RATIO_LIMIT, kl_terms, masked_sum, ratios, surrogate, value_errors

FLOAT32 = st.floats(-float(torch.finfo().max), float(torch.finfo().max), width=32)


# -- ratios and KL ----------------------------------------------------------------------------------------------------


def test_ratio_by_hand() -> None:
    """½ → ¾ is 1.5 times as likely, ½ → ½ the same: exactly 1 and 0."""
    ratio, log_ratio = ratios(torch.tensor([0.75, 0.5]).log(), torch.tensor([0.5, 0.5]).log())
    assert ratio.tolist() == [pytest.approx(1.5), 1.0]
    assert log_ratio.tolist() == [pytest.approx(math.log(1.5)), 0.0]


@pytest.mark.requirement(48)
@pytest.mark.parametrize("difference", [1e6, 1e30, 21.0])
def test_log_ratio_is_clamped(difference: float) -> None:
    """Log-ratios are clamped to ±20 on both sides; ratio, KL and their squares stay finite."""
    new, old = torch.tensor([difference, 0.0]), torch.tensor([0.0, difference])
    ratio, log_ratio = ratios(new, old)
    assert log_ratio.tolist() == [LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT]
    assert float(ratio[0] * ratio[1]) == pytest.approx(1.0)
    for finite in (ratio, ratio.square(), kl_terms(ratio, log_ratio)):
        assert bool(finite.isfinite().all())


@pytest.mark.requirement(48)
@given(FLOAT32, FLOAT32)
def test_ratio_is_finite(new: float, old: float) -> None:
    """The ratio is finite for any two log-probs that float32 can hold."""
    ratio, log_ratio = ratios(torch.tensor(new), torch.tensor(old))
    kl = kl_terms(ratio, log_ratio)
    assert bool(ratio.isfinite()) and bool(kl.isfinite())
    assert kl >= -1e-6


@pytest.mark.requirement(48)
def test_clamp_is_out_of_the_way() -> None:
    """Within the limit the gradient is that of the ratio; beyond it the gradient is zero."""
    new = torch.tensor([0.3, -3.0, 1e6, -1e6], requires_grad=True)
    ratio, _ = ratios(new, torch.zeros(4))
    (gradient,) = torch.autograd.grad(ratio.sum(), new)
    assert gradient.tolist() == pytest.approx([math.exp(0.3), math.exp(-3.0), 0.0, 0.0])


def test_kl_by_hand() -> None:
    """r − 1 − log r: 1.5 − 1 − log 1.5 = 0.0945, 0.5 − 1 − log 0.5 = 0.1931, and 0 where nothing changed."""
    ratio = torch.tensor([1.5, 0.5, 1.0])
    assert kl_terms(ratio, ratio.log()).tolist() == pytest.approx([0.0945349, 0.1931472, 0.0], abs=1e-6)


def test_kl_estimates_the_divergence() -> None:
    """Its mean under the old policy is KL(old ‖ new), exactly so where both choices are weighted as they occur."""
    old, new = torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.4])
    wanted = 0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4)
    assert float((old * kl_terms(*ratios(new.log(), old.log()))).sum()) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.requirement(47)
def test_empty_masks_give_no_kl() -> None:
    """The KL is exactly 0, however far apart the log-probs are."""
    terms = kl_terms(*ratios(torch.full((6, 3), 1e6), torch.zeros((6, 3))))
    assert masked_sum(terms, torch.zeros((6, 3), dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.requirement(12)
def test_kl_only_where_decided() -> None:
    """A head adds to the KL only on steps whose action uses it."""
    old = torch.zeros((4, 2))
    new = old.clone()
    new[:, 1] = torch.tensor([0.5, 2.0, -3.0, 1.0])
    waits = torch.tensor([[True, False]]).repeat(4, 1)
    terms = kl_terms(*ratios(new, old))
    assert masked_sum(terms, waits).tolist() == [0.0, 0.0]
    germinates = waits.clone()
    germinates[0, 1] = True
    # e^0.5 − 1 − 0.5 = 0.1487: the one step counts, none of the others
    assert masked_sum(terms, germinates).tolist() == pytest.approx([0.0, 0.1487213])


# -- policy -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(90)
@pytest.mark.parametrize(
    ("ratio", "advantages", "losses", "slopes"),
    [
        # inside 0.8 … 1.2: −r·A, and the slope is −A
        pytest.param([1.1, 0.9], [2.0, -2.0], [-2.2, 1.8], [-2.0, 2.0], id="inside"),
        # A > 0, r too large: held at −1.2·2, no slope. r too small: −0.5·2, and it may still grow
        pytest.param([1.5, 0.5], [2.0, 2.0], [-2.4, -1.0], [0.0, -2.0], id="good"),
        # A < 0, r too large: 1.5·2, it must still fall. r too small: held at 0.8·2, no slope
        pytest.param([1.5, 0.5], [-2.0, -2.0], [3.0, 1.6], [2.0, 0.0], id="bad"),
    ],
)
def test_clipped_surrogate(
    ratio: list[float], advantages: list[float], losses: list[float], slopes: list[float]
) -> None:
    """−min(r·A, clip(r, 0.8, 1.2)·A) for both signs of A, and its derivative."""
    moved = torch.tensor(ratio, requires_grad=True)
    found = surrogate(moved, torch.tensor(advantages), 0.2)
    assert found.tolist() == pytest.approx(losses)
    (gradient,) = torch.autograd.grad(found.sum(), moved)
    assert gradient.tolist() == pytest.approx(slopes)


@pytest.mark.requirement(90)
def test_two_steps_of_two_heads() -> None:
    """Each head sums over the steps that it decided, with its own advantages."""
    ratio = torch.tensor([[1.1, 1.5], [0.5, 9.0]])
    advantages = torch.tensor([[1.0, 2.0], [-1.0, 5.0]])
    decided = torch.tensor([[True, True], [True, False]])
    # op: −1.1·1 and 0.8·1 (held); slot: −1.2·2 (held), its second step is not its own
    assert masked_sum(surrogate(ratio, advantages, 0.2), decided).tolist() == pytest.approx([-1.1 + 0.8, -2.4])


# -- value ------------------------------------------------------------------------------------------------------------


def test_squared_error() -> None:
    """½·(3 − 1)² = 2 and ½·(0 − 4)² = 8."""
    assert value_errors(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 4.0]), torch.zeros(2)).tolist() == [2.0, 8.0]


@pytest.mark.requirement(90)
@pytest.mark.parametrize(
    ("value", "old", "target", "error", "slope"),
    [
        # moved from 0 to 3, held at 1: ½·(3 − 5)² = 2 < ½·(1 − 5)² = 8: the worse counts, and has no slope
        pytest.param(3.0, 0.0, 5.0, 8.0, 0.0, id="too far towards the target"),
        # held at 1: ½·(3 + 1)² = 8 > ½·(1 + 1)² = 2: the real one counts, with slope 3 + 1
        pytest.param(3.0, 0.0, -1.0, 8.0, 4.0, id="too far away from it"),
        # moved by ½: as it is, ½·(½ − 2)² = 1.125, slope ½ − 2
        pytest.param(0.5, 0.0, 2.0, 1.125, -1.5, id="inside"),
    ],
)
def test_pessimistic_value_clip(value: float, old: float, target: float, error: float, slope: float) -> None:
    """The loss takes the larger of both errors, with ±1 around the old value."""
    moved = torch.tensor([value], requires_grad=True)
    found = value_errors(moved, torch.tensor([target]), torch.tensor([old]), clip=1.0)
    assert found.tolist() == [error]
    (gradient,) = torch.autograd.grad(found.sum(), moved)
    assert gradient.tolist() == [slope]


@pytest.mark.requirement(4)
def test_value_clip_needs_old_values() -> None:
    """Nobody can leave them out."""
    with pytest.raises(TypeError, match="old"):
        value_errors(torch.zeros(2), torch.zeros(2), clip=0.2)  # type: ignore[call-arg]  # the mistake


def test_old_values_alone_clip_nothing() -> None:
    """They are there for the clip that may be off."""
    found = value_errors(torch.tensor([9.0]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert found.tolist() == [32.0]


def test_huber() -> None:
    """δ = 1: ½·0.5² = 0.125 inside, 1·(4 − ½) = 3.5 outside, on both sides."""
    found = value_errors(torch.tensor([0.5, 4.0, -4.0]), torch.zeros(3), torch.zeros(3), huber=1.0)
    assert found.tolist() == [0.125, 3.5, 3.5]


def test_huber_with_clip() -> None:
    """Held at 1: |1 − 5| = 4 → 3.5, where the value itself has |3 − 5| → 1.5."""
    found = value_errors(torch.tensor([3.0]), torch.tensor([5.0]), torch.zeros(1), clip=1.0, huber=1.0)
    assert found.tolist() == [3.5]


# -- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(90)
def test_masked_sum_by_hand() -> None:
    """The sums are 1 + 3 and 20, whatever the masked entries hold."""
    values = torch.tensor([[1.0, torch.nan], [torch.inf, 20.0], [3.0, -torch.inf]])
    mask = torch.tensor([[True, False], [False, True], [True, False]])
    assert masked_sum(values, mask).tolist() == [4.0, 20.0]


def test_masked_sum_counts() -> None:
    """Of something that is true or not."""
    assert float(masked_sum(torch.tensor([True, True, False, True]), torch.tensor([True, False, True, True]))) == 2.0


@pytest.mark.requirement(90)
def test_hidden_steps_get_no_gradient() -> None:
    """Masked steps get no gradient, even with an infinite ratio."""
    new = torch.tensor([0.1, 1e6, -1e6], requires_grad=True)
    ratio, _ = ratios(new, torch.zeros(3))
    loss = masked_sum(surrogate(ratio, torch.ones(3), 0.2), torch.tensor([True, False, False]))
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.tolist() == pytest.approx([-math.exp(0.1), 0.0, 0.0])
