"""The health of a memory."""

import pytest
import torch
from torch import Tensor

from esper.simic.telemetry import compute_lstm_health


def test_by_hand() -> None:
    """Two envs of two units; hidden squares sum to 2, so the root mean square is sqrt(2 / 4)."""
    hidden = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    cell = torch.tensor([[3.0, 0.0], [4.0, 0.0]])
    health = compute_lstm_health((hidden, cell))
    assert health is not None
    assert health.hidden_rms == pytest.approx(0.5**0.5)
    assert health.worst_env_rms == pytest.approx(0.5**0.5)
    assert health.hidden_max == 1.0
    assert health.cell_rms == pytest.approx(2.5)
    assert health.cell_max == 4.0
    assert health.saturated_share == 0.5
    assert health.dead_share == 0.5
    assert health.faults == 0


def test_worst_env() -> None:
    """One env whose memory is larger than the others'."""
    health = compute_lstm_health(torch.tensor([[0.1, 0.1], [0.8, 0.8]]))
    assert health is not None
    assert health.worst_env_rms == pytest.approx(0.8)
    assert health.cell_rms is None
    assert health.cell_max is None


def test_a_unit_that_speaks_once_is_alive() -> None:
    """Dead means silent in every env."""
    hidden = torch.zeros(4, 2)
    hidden[2, 0] = 0.3
    health = compute_lstm_health(hidden)
    assert health is not None
    assert health.dead_share == 0.5


@pytest.mark.requirement(43)
@pytest.mark.parametrize("nothing", [None, torch.zeros(0, 8), (torch.zeros(0, 8), torch.zeros(0, 8))])
def test_nothing_has_no_health(nothing: Tensor | tuple[Tensor, Tensor] | None) -> None:
    """Without a hidden state there are no figures, not zeros."""
    assert compute_lstm_health(nothing) is None


@pytest.mark.requirement(43)
def test_not_finite_is_counted_and_hides_nothing() -> None:
    """Faults in both parts are counted, and the norms cover the finite numbers."""
    hidden = torch.tensor([[torch.nan, 0.5], [torch.inf, -0.5]])
    cell = torch.tensor([[1.0, -torch.inf], [torch.nan, torch.nan]])
    health = compute_lstm_health((hidden, cell))
    assert health is not None
    assert (health.nan, health.inf) == (3, 2)
    assert health.hidden_max == 0.5
    assert health.hidden_rms == pytest.approx((0.5 / 4) ** 0.5)
    assert health.cell_max == 1.0
    assert health.dead_share == 0.0


@pytest.mark.requirement(43)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", [0, 1])
def test_a_single_fault_is_found(fault: float, part: int) -> None:
    """A single fault is found at any position."""
    hidden_state = torch.full((3, 4), 0.1), torch.full((3, 4), 0.1)
    hidden_state[part][1, 2] = fault
    health = compute_lstm_health(hidden_state)
    assert health is not None
    assert health.faults == 1


def test_several_steps_at_once() -> None:
    """Leading axes are envs and steps alike."""
    hidden = torch.rand(5, 3, 4)
    assert compute_lstm_health(hidden) == compute_lstm_health(hidden.flatten(0, 1))


def test_large_numbers_do_not_overflow() -> None:
    """Squares are taken in float64."""
    health = compute_lstm_health((torch.zeros(2, 2), torch.full((2, 2), 1e30)))
    assert health is not None
    assert health.cell_rms == pytest.approx(1e30)
