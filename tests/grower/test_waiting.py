"""A model that takes the state dict of one that grows, before it has a Grower or an optimizer."""

import copy

import pytest
import torch
from loops import BlindCNN, digits, equal, loader, make, plan, sgd, through_disk, train_epoch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.grower import Grower, expect_seeds, hidden_seeds
from esper.grower.container import CHILD
from esper.leyline import BadValueError

DATA = digits(200)
VALIDATION = digits(300)[0][200:], digits(300)[1][200:]
BIRTHS = plan((1, "stage1", "conv_light"), (2, "stage2", "depthwise"))


def grown(epochs: int) -> tuple[nn.Module, torch.optim.Optimizer, Grower]:
    """A model with two seeds, trained for some epochs."""
    model, optimizer, grower = make(policy=BIRTHS)
    for epoch in range(epochs):
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
    return model, optimizer, grower


def test_the_grower_comes_last() -> None:
    """Model, optimizer, Grower: as frameworks build them. It goes on as the others did."""
    model, optimizer, grower = grown(3)
    other = BlindCNN()
    expect_seeds(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(DATA[0]), model.eval()(DATA[0])), "it computes the same without a Grower"
    with hidden_seeds(other):
        assert len(list(other.parameters())) == 10 and not hasattr(other, CHILD)
        own = sgd(other)
    again = Grower(other, own, budget=2000, steps=8, policy=BIRTHS)
    own.load_state_dict(through_disk(optimizer.state_dict()))  # torch trains on with the tensors that it loads
    for each, stepped, growing in ((model, optimizer, grower), (other, own, again)):
        train_epoch(each, stepped, DATA, 3)
        assert growing.step(loader(VALIDATION)).step == 4
    assert equal(model.state_dict().items(), other.state_dict().items())


def test_an_optimizer_of_all_parameters() -> None:
    """Seeds that were in its groups already are not there twice."""
    model, *_ = grown(3)
    other = BlindCNN()
    expect_seeds(other)
    other.load_state_dict(model.state_dict())
    own = sgd(other)
    Grower(other, own, budget=2000, steps=8, policy=BIRTHS)
    parameters = [p for group in own.param_groups for p in group["params"]]
    assert len(parameters) == len(set(parameters)) == len(list(other.parameters()))


def test_from_before_growth() -> None:
    """A model that has not run yet takes weights without seeds; one with slots misses them."""
    weights = BlindCNN().state_dict()
    model, optimizer, _ = make()
    model.load_state_dict(weights)
    train_epoch(model, optimizer, DATA)
    with pytest.raises(RuntimeError, match=f"Missing key.*{CHILD}._extra_state"):
        model.load_state_dict(weights)


def test_one_grower_at_a_time() -> None:
    """Slots that wait are adopted once; a copy of a model with a Grower does not wait."""
    model = BlindCNN()
    expect_seeds(model)
    expect_seeds(model)  # changes nothing
    Grower(model, sgd(model), budget=2000)
    for taken in (model, copy.deepcopy(model)):
        with pytest.raises(BadValueError, match="has a Grower already"):
            expect_seeds(taken)


class Task(nn.Module):
    """Holds the model, as a LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.model, self.after = nn.Linear(2, 2), BlindCNN(), nn.Linear(2, 2)


@pytest.mark.parametrize("average_first", [False, True])
def test_an_average_of_a_larger_model(average_first: bool) -> None:
    """An average of what contains the model follows births and deaths too, and the end."""
    torch.manual_seed(0)
    task = Task()
    if average_first:
        average = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expect_seeds(task.model)
    if not average_first:
        average = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = sgd(task)
    grower = Grower(task.model, optimizer, budget=2000, steps=8, policy=BIRTHS)
    for epoch in range(3):
        train_epoch(task.model, optimizer, DATA, epoch)
        average.update_parameters(task)
        grower.step(loader(VALIDATION))
    assert f"model.{CHILD}.stage2.seed.scale.weight" in task.state_dict()
    assert average.module.state_dict().keys() == task.state_dict().keys()
    grower.finish(keep=["stage1"], drop=["stage2"])
    assert average.module.state_dict().keys() == task.state_dict().keys()
    average.update_parameters(task)
