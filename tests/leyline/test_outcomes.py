"""Measurements with their error, and the objective of an episode."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import Measurement, gain_over, mean_of, objective, relative_gain, rent


@pytest.mark.parametrize(
    ("value", "error", "beyond"),
    [(1.0, 0.5, True), (0.5, 0.5, False), (0.4, 0.5, False), (-2.0, 0.5, False), (0.0, 0.0, False), (1e-9, 0.0, True)],
)
def test_beyond_error(value: float, error: float, beyond: bool) -> None:
    """Positive by more than its own error; equality is not enough."""
    assert Measurement(value, error).beyond_error is beyond


def test_mean_of_none() -> None:
    """What was not measured is None, never 0."""
    assert mean_of(()) is None


def test_mean_of_one() -> None:
    """A single measurement is its own mean."""
    assert mean_of((Measurement(1.25, 0.5),)) == Measurement(1.25, 0.5)


def test_mean_of_two() -> None:
    """(1 + 4) / 2 = 2.5; sqrt(3² + 4²) / 2 = 2.5."""
    assert mean_of((Measurement(1.0, 3.0), Measurement(4.0, 4.0))) == Measurement(2.5, 2.5)


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 50)), min_size=1, max_size=5))
def test_mean_is_between_its_parts(pairs: list[tuple[float, float]]) -> None:
    """And its error is no larger than the largest."""
    found = mean_of(tuple(Measurement(*pair) for pair in pairs))
    assert found is not None
    values, errors = zip(*pairs, strict=True)
    assert min(values) - 1e-9 <= found.value <= max(values) + 1e-9
    assert 0 <= found.error <= max(errors) + 1e-9


def test_objective() -> None:
    """Gain 75 − 71 = 4; rent 2·log2(1 + 300/100) = 2·log2 4 = 4; objective 0."""
    assert (rent(300, 100), objective(75.0 - 71.0, 300, 100)) == (4.0, 0.0)


def test_relative_gain() -> None:
    """From a loss of 2.5 to 2.0: 100·0.5/2.5 = 20 points; back again 100·(−0.5)/2 = −25."""
    assert (relative_gain(2.5, 2.0), relative_gain(2.0, 2.5), relative_gain(2.0, 2.0)) == (20.0, -25.0, 0.0)
    losses = torch.tensor([2.0, 5.0])
    assert relative_gain(torch.tensor([2.5, 2.5]), losses).tolist() == [20.0, -100.0]


def test_rent_scales() -> None:
    """ρ points per doubling: one doubling at ρ = 3 costs 3, nothing grown costs nothing."""
    assert rent(100, 100, 3.0) == 3.0
    assert objective(0.0, 0, 100) == 0.0


@given(added=st.integers(0, 10**6), more=st.integers(1, 10**6), host=st.integers(1, 10**6))
def test_rent_grows(added: int, more: int, host: int) -> None:
    """More parameters never cost less, and the rent is finite."""
    assert 0 <= rent(added, host) <= rent(added + more, host) < math.inf


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_rent_of_tensors(dtype: torch.dtype) -> None:
    """Equal to the bit to the formula in the tensors' own dtype; counts become float32."""
    added, host = torch.arange(0, 3000, 7).to(dtype), torch.arange(1, 430).to(dtype)
    gain = torch.linspace(-3, 9, 429, dtype=torch.float32 if dtype == torch.int64 else dtype)
    for divisor in (host, 1234):
        expected = 1.5 * torch.log2(1 + added / divisor)
        assert rent(added, divisor, 1.5).dtype == gain.dtype
        assert torch.equal(rent(added, divisor, 1.5), expected)
        assert torch.equal(objective(gain, added, divisor, 1.5), gain - expected)


def test_gain_over_a_control() -> None:
    """By accuracy 60 − 50 = 10. By loss: 2 and 1.5 are 20 and 40 % below a guess of 2.5; (2 − 1.5) / 2 = 25 %."""
    assert gain_over(50.0, 60.0) == 10.0
    control, score = (relative_gain(2.5, loss) for loss in (2.0, 1.5))
    assert [control, score] == pytest.approx([20, 40])
    assert gain_over(control, score, by_loss=True) == pytest.approx(relative_gain(2.0, 1.5)) == pytest.approx(25)
