"""Measurements with their error, and the objective of an episode."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import EpisodeOutcome, Measurement, mean_of


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
    outcome = EpisodeOutcome(accuracy=75.0, control_accuracy=71.0, added_parameters=300, host_parameters=100)
    assert (outcome.gain, outcome.rent(), outcome.objective()) == (4.0, 4.0, 0.0)


def test_rent_scales() -> None:
    """ρ points per doubling: one doubling at ρ = 3 costs 3, nothing grown costs nothing."""
    assert EpisodeOutcome(70.0, 70.0, 100, 100).rent(3.0) == 3.0
    assert EpisodeOutcome(70.0, 70.0, 0, 100).objective() == 0.0


@given(added=st.integers(0, 10**6), more=st.integers(1, 10**6), host=st.integers(1, 10**6))
def test_rent_grows(added: int, more: int, host: int) -> None:
    """More parameters never cost less, and the rent is finite."""
    small, large = (EpisodeOutcome(0.0, 0.0, count, host).rent() for count in (added, added + more))
    assert 0 <= small <= large < math.inf
