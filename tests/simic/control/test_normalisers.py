"""Observations, rewards and returns on a common scale."""

from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from nissa.watchers import Recorder
from simic.training.smallest import config
from torch import Tensor

from esper.leyline import BadValueError
from esper.nissa import Hub
from esper.simic.control import (
    ObservationNormalizer,
    ReturnNormalizer,
    RewardNormalizer,
    RunningMeanStd,
)
from esper.simic.training.trainer import Trainer
from esper.tamiyo import ObservationLayout

GOES_ON = torch.tensor([False])


# -- observations -----------------------------------------------------------------------------------------------------


def test_slots_share_their_statistics() -> None:
    """Two slots, each with a width and a depth, behind one column of the host: three statistics."""
    layout = ObservationLayout(host=("loss",), slot=("width", "depth"), slots=2)
    found = ObservationNormalizer(layout.columns())
    rows = torch.tensor([[9.0, 1, 10, 3, 20], [9.0, 5, 30, 7, 40]])
    found.update(rows[:1])
    found.update(rows[1:])
    # widths 1 3 5 7: mean 4, variance (9 + 1 + 1 + 9)/4 = 5; depths 10 … 40: mean 25, variance 125
    assert found.statistics.mean.tolist() == [9.0, 4.0, 25.0]
    assert found.statistics.var.tolist() == pytest.approx([0.0, 5.0, 125.0])
    seen = found(rows[0])
    assert seen.tolist() == pytest.approx([0.0, -3 / 5**0.5, -15 / 125**0.5, -1 / 5**0.5, -5 / 125**0.5])


def test_observations_before_the_first_round() -> None:
    """As they are, within ± 10."""
    found = ObservationNormalizer(torch.arange(3))
    assert found(torch.tensor([0.5, -3.0, 400.0])).tolist() == [0.5, -3.0, 10.0]


def test_constant_column() -> None:
    """It becomes 0; what is seen in it later is clipped, not infinite."""
    found = ObservationNormalizer(torch.arange(1))
    found.update(torch.full((7, 1), 1234.567))
    assert found(torch.tensor([[1234.567], [1235.0], [1234.0]])).tolist() == [[0.0], [10.0], [-10.0]]


def test_policy_sees_float32() -> None:
    """Also where an environment counts in double precision; leading axes stay."""
    found = ObservationNormalizer(torch.arange(2))
    found.update(torch.tensor([[1.0, 2.0], [3.0, 2.0]], dtype=torch.float64))
    seen = found(torch.ones((4, 3, 2), dtype=torch.float64))
    assert (seen.dtype, seen.shape) == (torch.float32, (4, 3, 2))


@pytest.mark.requirement(5)
def test_freeze_stops_updates() -> None:
    """After the freeze, the policy's inputs stop shifting."""
    found = ObservationNormalizer(torch.arange(2))
    found.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    row = torch.tensor([[5.0, 5.0]])
    before, state = found(row), found.statistics.state_dict()
    found.freeze()
    found.update(torch.full((50, 2), 80.0))
    assert torch.equal(found(row), before)
    assert all(torch.equal(value, state[name]) for name, value in found.statistics.state_dict().items())


@pytest.mark.requirement(86)
def test_observations_are_seen_by_the_latest_statistics() -> None:
    """After an update, and after statistics were loaded, the same observation is seen otherwise."""
    found, row = ObservationNormalizer(torch.arange(1)), torch.tensor([[5.0]])
    assert found(row).tolist() == [[5.0]]
    found.update(torch.tensor([[1.0], [3.0]]))
    assert found(row).tolist() == [[3.0]]  # mean 2, deviation 1
    # 1 3 10 14: mean 7, variance (36 + 16 + 9 + 49)/4 = 27.5
    found.update(torch.tensor([[10.0], [14.0]]))
    assert found(row).tolist() == [[pytest.approx(-2 / 27.5**0.5)]]
    found.statistics.load_state_dict({"mean": torch.ones(1), "var": torch.full((1,), 4.0), "count": torch.ones(1)})
    assert found(row).tolist() == [[2.0]]


@pytest.mark.requirement(5)
def test_seeing_changes_nothing() -> None:
    """Only `update` changes the statistics, so every step of a round is normalised alike."""
    found = ObservationNormalizer(torch.arange(2))
    found.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    state = found.statistics.state_dict()
    found(torch.full((50, 2), 80.0))
    assert all(torch.equal(value, state[name]) for name, value in found.statistics.state_dict().items())


@pytest.mark.parametrize("shape", [(3,), (4, 2), (2, 2, 3)])
def test_observations_of_another_shape(shape: tuple[int, ...]) -> None:
    """Refused, frozen or not; an empty round is none."""
    found = ObservationNormalizer(torch.arange(3))
    found.update(torch.empty((0, 3)))
    assert found.statistics.count.tolist() == [0.0] * 3
    with pytest.raises(BadValueError, match=r"wanted \(n, 3\)"):
        found.update(torch.zeros(shape))


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_rewards_over_the_deviation_of_the_return() -> None:
    """Hand-computed with γ = ½: the discounted return goes 4, 2 + 2 = 4, 2 + 0 = 2."""
    found = RewardNormalizer(1, 0.5)
    assert found(torch.tensor([4.0]), GOES_ON).tolist() == [4.0]  # no spread yet: as it is
    assert found(torch.tensor([2.0]), GOES_ON).tolist() == [2.0]  # 4 again
    # returns 4 4 2: mean 10/3, variance (4/9 + 4/9 + 16/9)/3 = 8/9
    found(torch.tensor([0.0]), GOES_ON)
    # the fourth is 1 + 8 = 9: mean 19/4, variance (16 + 16 + 4 + 81)/4 − (19/4)² = 6.6875
    assert found(torch.tensor([8.0]), GOES_ON).tolist() == pytest.approx([8 / 6.6875**0.5])


def test_return_begins_again_after_an_episode() -> None:
    """The reward that ends one still belongs to it: with γ = 1 returns are 1, 2 | 1, 2, not 1, 2, 3, 4."""
    found = RewardNormalizer(1, 1.0)
    for done in (False, True, False, True):
        found(torch.tensor([1.0]), torch.tensor([done]))
    assert found.statistics.mean.tolist() == [1.5]
    assert found.statistics.var.tolist() == pytest.approx([0.25])
    assert found.returns.tolist() == [0.0]


def test_only_the_ended_return_begins_again() -> None:
    """Envs have their own."""
    found = RewardNormalizer(2, 1.0)
    found(torch.tensor([1.0, 5.0]), torch.tensor([True, False]))
    assert found.returns.tolist() == [0.0, 5.0]


def test_signs_are_kept() -> None:
    """Nothing is centred, however one-sided rewards are."""
    found, generator = RewardNormalizer(8, 0.9), torch.Generator().manual_seed(1)
    for _ in range(30):
        rewards = 100 + torch.randn(8, generator=generator)
        rewards[:2] = torch.tensor([0.0, -1e-3])
        scaled = found(rewards, torch.zeros(8, dtype=torch.bool))
        assert torch.equal(scaled.sign(), rewards.sign())
    assert float(scaled.abs().max()) < 10


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e6])
def test_unit_of_rewards_does_not_matter(scale: float) -> None:
    """Once returns differ, the same rewards in another unit come out the same."""
    found, other = RewardNormalizer(4, 0.9), RewardNormalizer(4, 0.9)
    generator, done = torch.Generator().manual_seed(2), torch.zeros(4, dtype=torch.bool)
    for _ in range(5):
        rewards = torch.randn(4, generator=generator)
        assert torch.allclose(found(rewards * scale, done), other(rewards, done), rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.0])
def test_constant_returns(value: float) -> None:
    """Episodes of one step, always the same reward: it stays, and is not blown up to the clip."""
    found = RewardNormalizer(3, 0.99)
    for _ in range(20):
        scaled = found(torch.full((3,), value), torch.ones(3, dtype=torch.bool))
        assert scaled.tolist() == pytest.approx([value] * 3)


def test_outlier_is_clipped() -> None:
    """± 10 deviations, in the dtype that came in."""
    found = RewardNormalizer(2, 1.0)
    for place in range(400):
        found(torch.tensor([place % 2, 0.0], dtype=torch.float64), torch.tensor([True, True]))
    scaled = found(torch.tensor([1e3, -1e-3], dtype=torch.float64), torch.tensor([True, True]))
    assert scaled[0] == 10
    assert -0.1 < float(scaled[1]) < 0
    assert scaled.dtype == torch.float64


def test_rewards_that_are_refused() -> None:
    """A column of rewards would otherwise spread over all envs."""
    found = RewardNormalizer(3, 0.9)
    for rewards, done in [((3, 1), (3,)), ((3,), (1,)), ((), (3,))]:
        with pytest.raises(BadValueError, match=r"wanted \(3,\)"):
            found(torch.zeros(rewards), torch.zeros(done, dtype=torch.bool))
    assert found.statistics.count.tolist() == [0.0]
    with pytest.raises(BadValueError, match="gamma"):
        RewardNormalizer(3, 1.5)


# -- returns ----------------------------------------------------------------------------------------------------------


def returns_of_two_tasks() -> tuple[Tensor, Tensor, Tensor]:
    """Returns, tasks, and which of them count."""
    chosen = torch.tensor([True, True, True, True, False, False])
    return torch.tensor([1.0, 100, 3, 140, torch.nan, 1e9]), torch.tensor([0, 1, 0, 1, 0, 1]), chosen


def test_returns_per_task() -> None:
    """Task 0 has 2 ± 1, task 1 has 120 ± 20; what is not chosen has no influence."""
    found = ReturnNormalizer(2)
    returns, tasks, chosen = returns_of_two_tasks()
    found.update(returns, tasks, chosen)
    assert found.statistics.mean.tolist() == [2.0, 120.0]
    assert found.normalise(returns, tasks)[:4].tolist() == [-1.0, -1.0, 1.0, 1.0]


@pytest.mark.requirement(86)
def test_returns_are_in_units_of_the_latest_statistics() -> None:
    """By hand: the first batch has 2 ± 1. A second of 12 ± 0 moves the mean by a tenth of 10, and the variance to
    0.9·1 + 0.1·0 + 0.09·100 = 9.9."""
    found, tasks = ReturnNormalizer(), torch.zeros(2, dtype=torch.long)
    value = torch.tensor([5.0])
    assert found.normalise(value, tasks[:1]).tolist() == [5.0]
    found.update(torch.tensor([1.0, 3.0]), tasks)
    assert found.normalise(value, tasks[:1]).tolist() == [3.0]
    found.update(torch.tensor([12.0, 12.0]), tasks)
    assert found.normalise(value, tasks[:1]).tolist() == [pytest.approx(2 / 9.9**0.5)]
    assert found.restore(value, tasks[:1]).tolist() == [pytest.approx(3 + 5 * 9.9**0.5)]


def test_restore_is_the_inverse() -> None:
    """What the critic says in its units is a return again."""
    found = ReturnNormalizer(2)
    returns, tasks, chosen = returns_of_two_tasks()
    found.update(returns, tasks, chosen)
    values = torch.linspace(-2, 2, 6)
    np.testing.assert_allclose(found.normalise(found.restore(values, tasks), tasks), values, atol=1e-5)
    assert found.restore(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])).tolist() == [2.5, 130.0]


def test_task_without_returns() -> None:
    """It keeps the identity, and no round without steps can spoil it."""
    found = ReturnNormalizer(2)
    nothing = torch.zeros(6, dtype=torch.bool)
    returns, tasks, _ = returns_of_two_tasks()
    found.update(returns, tasks, nothing)
    found.update(torch.empty(0), torch.empty(0, dtype=torch.long))
    assert found.normalise(torch.tensor([0.3]), torch.tensor([1])).tolist() == pytest.approx([0.3])


def test_constant_returns_stay_finite() -> None:
    """They are 0 in the critic's units."""
    found = ReturnNormalizer()
    tasks = torch.zeros(9, dtype=torch.long)
    found.update(torch.full((9,), 5.3), tasks)
    assert found.normalise(torch.full((9,), 5.3), tasks).tolist() == [0.0] * 9


# -- one thread -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(19)
def test_statistics_belong_to_the_thread_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run whose sinks have threads of their own, one thread updates and reads all statistics."""
    threads: dict[str, set[int]] = {}

    def watch(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def watched(self: object, *arguments: Any, **settings: Any) -> Any:  # Any: whatever the method takes and gives
            threads.setdefault(f"{kind.__name__}.{name}", set()).add(get_ident())
            return real(self, *arguments, **settings)

        monkeypatch.setattr(kind, name, watched)

    watch(RunningMeanStd, "_merge")
    watch(ObservationNormalizer, "update")
    watch(ObservationNormalizer, "__call__")
    watch(ReturnNormalizer, "update")
    watch(ReturnNormalizer, "normalise")
    recorder = Recorder()
    trainer = Trainer(config(rounds=2), tmp_path / "run")
    trainer.recorder.hub.close()
    trainer.recorder.hub = Hub([recorder])
    trainer.run(progress=False)
    assert len(threads) == 5
    assert set().union(*threads.values()) == {get_ident()}
    assert recorder.threads - {get_ident()}, "there was another thread that could have"


@pytest.mark.requirement(19)
@pytest.mark.parametrize("momentum", [None, 0.1])
def test_statistics_replace_their_tensors(momentum: float | None) -> None:
    """Who holds the moments of a moment ago holds numbers that belong together, and a new object means
    new numbers, which is how normalisers know that theirs are stale."""
    found = ObservationNormalizer(torch.arange(2))
    found.statistics = RunningMeanStd(2, momentum)
    found.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    held = found.statistics.mean, found.statistics.var, found.statistics.count
    copies = [tensor.clone() for tensor in held]
    before = found(torch.tensor([[5.0, 5.0]]))
    found.update(torch.full((50, 2), 80.0))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(held, copies, strict=True))
    assert found.statistics.mean is not held[0]
    assert not torch.equal(found(torch.tensor([[5.0, 5.0]])), before)
