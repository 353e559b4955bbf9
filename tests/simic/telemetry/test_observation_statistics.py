"""What the policy saw, by column."""

import pytest
import torch

from esper.simic.control import CLIP
from esper.simic.telemetry.examination import ColumnStatistics, observation_statistics
from esper.tamiyo import ObservationLayout


def test_by_hand() -> None:
    """Two steps of one env; the second name owns two numbers each."""
    observations = torch.tensor([[1.0, 10.0, -2.0], [3.0, 0.0, -10.0]])
    found = observation_statistics(observations, ["time", "slot.alpha"], torch.tensor([0, 1, 1]))
    assert found["time"] == ColumnStatistics(2.0, 1.0, 1.0, 3.0, 0.0, 0, 2)
    # (10, −2, 0, −10): mean −0.5, mean square 51, two of four at the bound of 10
    column = found["slot.alpha"]
    assert (column.mean, column.min, column.max) == (-0.5, -10.0, 10.0)
    assert column.std == pytest.approx((51 - 0.25) ** 0.5)
    assert (column.at_bound, column.not_finite, column.count) == (0.5, 0, 4)
    assert CLIP == 10.0


def test_not_finite_is_counted_apart() -> None:
    """The rest of the column keeps its figures; a column of nothing else has none."""
    observations = torch.tensor([[1.0, torch.nan], [torch.inf, torch.nan], [3.0, torch.nan], [2.0, torch.nan]])
    found = observation_statistics(observations, ["a", "b"])
    assert (found["a"].mean, found["a"].min, found["a"].max) == (2.0, 1.0, 3.0)
    assert (found["a"].at_bound, found["a"].not_finite, found["a"].count) == (0.25, 1, 4)
    assert found["a"].std == pytest.approx((2 / 3) ** 0.5)
    assert found["b"] == ColumnStatistics(None, None, None, None, 0.0, 4, 4)


def test_without_rows() -> None:
    """A round without steps."""
    assert observation_statistics(torch.zeros(0, 1), ["a"])["a"] == ColumnStatistics(None, None, None, None, 0.0, 0, 0)


def test_columns_of_a_layout() -> None:
    """All slots of a column are one column, as in the normaliser; leading axes are steps and envs alike."""
    layout = ObservationLayout(host=("time",), slot=("alpha", "stage"), slots=3)
    observations = torch.randn(5, 4, layout.size)
    found = observation_statistics(observations, layout.column_names, layout.columns())
    assert tuple(found) == layout.column_names
    alphas = layout.split(observations).slots[..., 0].double()
    assert found["slot.alpha"].mean == pytest.approx(float(alphas.mean()))
    assert found["slot.alpha"].std == pytest.approx(float(alphas.std(correction=0)))
    assert found["slot.alpha"].max == float(alphas.max())
    assert found["slot.alpha"].count == 60


def test_small_spread_on_a_large_mean() -> None:
    """Deviations are taken about the mean, not from a difference of squares."""
    observations = torch.tensor([[1e6], [1e6 + 1]], dtype=torch.float64)
    assert observation_statistics(observations, ["a"])["a"].std == pytest.approx(0.5, rel=1e-9)
