"""A round looked at closely."""

import math

import pytest
import torch
from simic.telemetry.remote import remote, watched_device
from torch import Tensor, nn

from esper.simic.agent import TamiyoRolloutBuffer
from esper.simic.telemetry import Examination, GradientMonitor, compute_lstm_health, worst_health
from esper.simic.telemetry.measurements import GradientFigures
from esper.tamiyo import discrete_table, vector_layout


def a_round(envs: int = 2, steps: int = 3) -> TamiyoRolloutBuffer:
    """Two heads, two columns; the second env has no third step."""
    table = discrete_table((4, 3))
    buffer = TamiyoRolloutBuffer(envs, steps, 2, table, 4)
    buffer.actions[:] = torch.arange(envs * steps * 2).view(envs, steps, 2) % 3
    buffer.observations[:] = torch.arange(envs * steps * 2).view(envs, steps, 2).float()
    buffer.lengths[:] = torch.tensor([3, 2])
    return buffer


def network(gradient: float) -> nn.Module:
    """One weight with this gradient."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    module[0].weight.grad = torch.tensor([[gradient]])
    return module


def show(examination: Examination, cells: list[int], ratios: list[list[float]], gradient: float = 1.0) -> None:
    """A minibatch in which both heads decided everything."""
    log_ratios = torch.tensor(ratios).log()
    decided = torch.ones_like(log_ratios, dtype=torch.bool)
    examination.on_minibatch(network(gradient), torch.tensor(cells), log_ratios, decided)


def test_the_worst_ratio_of_each_step() -> None:
    """Cell 4 is the second step of env 1. In the first epoch its heads have ratios of 8 and 1, in the second of 2 and
    3: the joint ones are 8 and 6, and 8 is reported, by head and for the joint action; with what was done there."""
    buffer = a_round()
    examination = Examination(buffer, vector_layout(2))
    show(examination, [4, 0], [[8.0, 1.0], [1.0, 1.0]])
    show(examination, [4, 0], [[2.0, 3.0], [1.0, 1.0]])
    heads = buffer.table.names
    report = examination.report({}).ratios
    assert report.examined == {heads[0]: 2, heads[1]: 2, "joint": 2}
    assert report.exploded == {heads[0]: 1, heads[1]: 0, "joint": 1}
    assert {(each.env, each.step, each.head, round(each.ratio, 4), each.action) for each in report.worst} == {
        (1, 1, heads[0], 8.0, tuple(buffer.actions[1, 1].tolist())),
        (1, 1, "joint", 8.0, tuple(buffer.actions[1, 1].tolist())),
    }


def test_only_what_was_decided() -> None:
    """The other head's ratio is in no joint one and in no count."""
    examination = Examination(a_round(), vector_layout(2))
    log_ratios = torch.tensor([[100.0, 2.0]]).log()
    examination.on_minibatch(network(1.0), torch.tensor([0]), log_ratios, torch.tensor([[False, True]]))
    report = examination.report({}).ratios
    assert list(report.examined.values()) == [0, 1, 1]
    assert not any((*report.exploded.values(), *report.vanished.values(), *report.not_a_number.values()))


def test_a_ratio_that_is_no_number_stays() -> None:
    """Whatever comes after it."""
    examination = Examination(a_round(), vector_layout(2))
    show(examination, [0], [[math.nan, 1.0]])
    show(examination, [0], [[50.0, 1.0]])
    report = examination.report({}).ratios
    assert list(report.not_a_number.values()) == [1, 0, 1]
    assert list(report.exploded.values()) == [0, 0, 0]


def test_gradients_of_all_minibatches() -> None:
    """The largest norm, and every fault; copied, for the next minibatch overwrites them."""
    examination = Examination(a_round(), vector_layout(2))
    for gradient in (3.0, 5.0, math.nan, math.inf, 4.0):
        show(examination, [0], [[1.0, 1.0]], gradient)
    report = examination.report({}).gradients
    assert report.total == GradientFigures(5.0, 5.0, 1, 1, 0.0, 1)
    assert report.not_finite == ("0",)


def test_observations_without_padding() -> None:
    """The cell that holds no step is in no column: of 0 2 4 | 6 8 the mean is 4."""
    report = Examination(a_round(), vector_layout(2)).report({})
    first, second = report.observations.values()
    assert (first.count, first.mean, first.max) == (5, 4.0, 8.0)
    assert (second.count, second.mean, second.max) == (5, 5.0, 9.0)


@pytest.mark.requirement(6)
def test_several_passes_are_read_once() -> None:
    """Any number of minibatches takes one read; a part is measured wherever it has a gradient."""
    passes: list[dict[str, Tensor | None]] = [
        {"lstm.a": torch.tensor([3.0, 4.0]), "lstm.b": None, "critic.a": None},
        {"lstm.a": torch.tensor([0.0, 1.0]), "lstm.b": torch.tensor([2.0, 2.0]), "critic.a": None},
    ]
    watch = GradientMonitor()
    with watched_device() as reads:
        for each in passes:
            watch.add({name: None if found is None else remote(found) for name, found in each.items()})
        assert reads.reads == []
        report = watch.report()
    assert reads.reads == ["_to_copy to cpu"]
    assert report.modules == {"lstm": GradientFigures(5.0, 4.0, 0, 0, 0.125, 4), "critic": None}
    assert report.unmeasured == ("critic.a",)


@pytest.mark.requirement(43)
def test_the_worst_of_several_memories() -> None:
    """Each figure is the maximum and faults add up; unexamined states do not count."""
    calm, wild = torch.full((2, 4), 0.1), torch.full((2, 4), 0.99)
    broken = torch.tensor([[math.nan, 0.5, 0.5, 0.5]])
    worst = worst_health([compute_lstm_health((calm, calm)), None, compute_lstm_health((wild, wild * 20))])
    assert worst is not None
    assert worst.cell_rms == pytest.approx(19.8)
    assert (worst.saturated_share, worst.nan) == (1.0, 0)
    both = worst_health([compute_lstm_health(broken), compute_lstm_health((broken, broken))])
    assert both is not None
    assert (both.nan, both.cell_max) == (3, 0.5)
    assert worst_health([None, None]) is worst_health([]) is None
