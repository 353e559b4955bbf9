"""Running mean and variance."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import BadValueError, UnknownNameError
from esper.simic import control
from esper.simic.control import RunningMeanStd, StatisticsMode


def column(*values: float) -> Tensor:
    """A batch of one column."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def two_gaussians(batches: int = 60) -> list[Tensor]:
    """(40, 2) each; from the middle on they come from another distribution."""
    generator = torch.Generator().manual_seed(3)
    early = torch.tensor([1.0, -5.0]), torch.tensor([2.0, 0.1])
    late = torch.tensor([11.0, 4.0]), torch.tensor([0.5, 3.0])
    moments = [early if batch < batches // 2 else late for batch in range(batches)]
    return [mean + std * torch.randn((40, 2), generator=generator) for mean, std in moments]


# -- moving average ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement(40)
def test_moving_average_of_two_gaussians() -> None:
    """The formula holds in float64 after every batch, and ends near the later distribution."""
    found = RunningMeanStd(2, "ema", momentum=0.1)
    mean, var = np.zeros(2), np.ones(2)
    for place, batch in enumerate(two_gaussians()):
        found.update(batch)
        values = batch.double().numpy()
        share = 1.0 if place == 0 else 0.1
        gap = values.mean(0) - mean
        var = (1 - share) * var + share * values.var(0) + share * (1 - share) * gap**2
        mean = mean + share * gap
        assert np.abs(found.mean.numpy() - mean).max() < 1e-12
        assert np.abs(found.var.numpy() - var).max() < 1e-12
    # 30 batches after the change the early one has a weight of 0.9³⁰ = 0.042.
    assert found.mean.tolist() == pytest.approx([11 - 0.42, 4 - 0.38], abs=0.4)


@pytest.mark.requirement(40)
def test_total_variance() -> None:
    """The distance between the means of two batches adds to the variance."""
    found = RunningMeanStd(1, "ema", momentum=0.25)
    found.update(column(0, 0))
    found.update(column(4, 4))
    # mean 0 + 0.25·4 = 1; both batches are constant, the mixture has 0.25·0.75·4² = 3.
    assert found.mean.tolist() == [1.0]
    assert found.var.tolist() == [3.0]


@pytest.mark.requirement(40)
def test_first_batch_is_taken_as_it_is() -> None:
    """Averaging with the initial zeros would bias dozens of rounds."""
    found = RunningMeanStd(1, "ema", momentum=0.01)
    found.update(column(10, 14))
    assert (found.mean.tolist(), found.var.tolist(), found.count.tolist()) == ([12.0], [4.0], [2.0])


def test_columns_begin_on_their_own() -> None:
    """A column whose first value comes late is not averaged with nothing either."""
    found = RunningMeanStd(2, "ema", momentum=0.5)
    found.update_by(torch.tensor([6.0]), torch.tensor([0]))
    found.update_by(torch.tensor([8.0, 8.0]), torch.tensor([0, 1]))
    assert found.mean.tolist() == [7.0, 8.0]


# -- everything seen --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e-3, 1e-3)), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_running_equals_numpy(rows: list[tuple[float, float]], cuts: list[int]) -> None:
    """However the stream is cut, empty batches included, the moments are those of all of it."""
    values = np.array(rows)
    found = RunningMeanStd(2)
    for batch in np.split(values, sorted(min(cut, len(values)) for cut in cuts)):
        found.update(torch.from_numpy(batch))
    np.testing.assert_allclose(found.mean.numpy(), values.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.var.numpy(), values.var(0), rtol=1e-9, atol=1e-9)
    assert found.count.tolist() == [len(values)] * 2


def test_far_from_zero() -> None:
    """A mean of 10⁸ leaves the variance intact, which a difference of squares would not."""
    found = RunningMeanStd(1)
    for _ in range(50):
        found.update(column(1e8 - 1, 1e8 + 1))
    assert found.var.tolist() == pytest.approx([1.0], rel=1e-6)


@pytest.mark.parametrize("mode", ["running", "ema"])
def test_columns_without_values_stay(mode: StatisticsMode) -> None:
    """Also if none of their values is chosen."""
    found = RunningMeanStd(3, mode)
    found.update_by(torch.tensor([3.0, 5.0]), torch.tensor([1, 1]))
    before = found.state_dict()
    found.update_by(torch.tensor([torch.nan] * 3), torch.arange(3), torch.zeros(3, dtype=torch.bool))
    found.update_by(torch.tensor([1.0]), torch.tensor([0]))
    after = found.state_dict()
    assert [value[1:].tolist() for value in after.values()] == [value[1:].tolist() for value in before.values()]
    assert after["mean"].tolist() == [1.0, 4.0, 0.0]


def test_chosen_values() -> None:
    """Others may be anything."""
    found, wanted = RunningMeanStd(2), RunningMeanStd(2)
    values = torch.tensor([1.0, torch.nan, 3.0, torch.inf])
    found.update_by(values, torch.tensor([0, 0, 0, 1]), torch.tensor([True, False, True, False]))
    wanted.update_by(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]))
    assert {name: value.tolist() for name, value in found.state_dict().items()} == {
        name: value.tolist() for name, value in wanted.state_dict().items()
    }


@pytest.mark.parametrize("mode", ["running", "ema"])
def test_constant_and_empty_input(mode: StatisticsMode) -> None:
    """A deviation that divides is never 0, and nothing is ever not a number."""
    found = RunningMeanStd(1, mode)
    found.update(torch.empty((0, 1)))
    assert (found.mean.tolist(), found.std.tolist()) == ([0.0], [1.0])
    for _ in range(3):
        found.update(column(0.1, 0.1, 0.1))
    assert found.mean.tolist() == pytest.approx([0.1])
    assert found.std.tolist() == pytest.approx([1e-4])


# -- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(40)
@pytest.mark.parametrize("mode", ["running", "ema"])
def test_state_round_trip(mode: StatisticsMode) -> None:
    """A restored average continues like the original and shares no memory with it."""
    first, second = RunningMeanStd(2, mode), RunningMeanStd(2, mode)
    batches = two_gaussians(4)
    for batch in batches[:2]:
        first.update(batch)
    state = first.state_dict()
    second.load_state_dict(state)
    for value in state.values():
        value.fill_(torch.nan)
    for batch in batches[2:]:
        first.update(batch)
        second.update(batch)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


@pytest.mark.requirement(40)
@pytest.mark.parametrize("mode", ["running", "ema"])
def test_reset(mode: StatisticsMode) -> None:
    """After a reset it is as new, and the first batch again sets the mean."""
    found, fresh = RunningMeanStd(2, mode), RunningMeanStd(2, mode)
    batches = two_gaussians(2)
    found.update(batches[0])
    found.reset()
    for statistic in (found, fresh):
        statistic.update(batches[1])
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"var": torch.ones(3)}, id="size"),
        pytest.param({"count": torch.ones(())}, id="shape"),
        pytest.param({"momentum": torch.ones(2)}, id="unknown"),
        pytest.param({"var": None}, id="missing"),
    ],
)
def test_foreign_state_changes_nothing(change: dict[str, Tensor | None]) -> None:
    """Also where some of it would fit."""
    found = RunningMeanStd(2)
    found.update(torch.ones((2, 2)))
    before = found.state_dict()
    state = {"mean": torch.full((2,), 7.0), "var": torch.ones(2), "count": torch.ones(2)} | change
    with pytest.raises(BadValueError, match="cannot be restored from"):
        found.load_state_dict({name: value for name, value in state.items() if value is not None})
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())


# -- contract ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(19)
def test_threading_contract_is_written_down() -> None:
    """The docstring says that one thread uses it."""
    text = " ".join((control.__doc__ or "").split())
    assert "Threads: nothing here is locked; only the thread of the training loop may use it." in text


def test_what_is_refused() -> None:
    """Each at the door."""
    with pytest.raises(UnknownNameError, match="allowed: running, ema"):
        RunningMeanStd(1, "median")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(BadValueError, match="momentum"):
        RunningMeanStd(1, "ema", momentum=0.0)
    with pytest.raises(BadValueError, match=r"wanted \(n, 2\)"):
        RunningMeanStd(2).update(torch.zeros((4, 3)))
