"""`AveragedModel` in any order: built before or after the Grower, through births, deaths and the end."""

import warnings

import pytest
import torch
from loops import BlindCNN, digits, equal, loader, make, plan, sgd, train_epoch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.grower import Grower
from esper.grower.container import CHILD

IMAGES, LABELS = digits(400)
DATA, VALIDATION = (IMAGES[:300], LABELS[:300]), (IMAGES[300:], LABELS[300:])
BIRTHS = plan((1, "stage1", "conv_light"), (1, "stage2", "depthwise"))


def average_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


@pytest.mark.parametrize("order", ["before", "after"])
def test_averages_made_before_the_first_pass(order: str) -> None:
    """An AveragedModel may be built before the Grower, or after it and before the model runs."""
    torch.manual_seed(0)
    model = BlindCNN()
    other = average_of(BlindCNN())  # of another model with the same class
    early = average_of(model) if order == "before" else None
    optimizer = sgd(model)
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=BIRTHS)
    average = early or average_of(model)
    for epoch in range(3):
        train_epoch(model, optimizer, DATA, epoch)
        average.update_parameters(model)
        grower.step(loader(VALIDATION))
    own, theirs = (list(getattr(each, CHILD).parameters()) for each in (model, average.module))
    assert len(own) == len(theirs) > 0 and not hasattr(other.module, CHILD)


def test_averages_finish_with_the_model() -> None:
    """After finish, the average has the same blocks with its own averaged weights, and still pairs with the model."""
    model, optimizer, grower = make(policy=BIRTHS)
    average = average_of(model)
    for epoch in range(3):
        train_epoch(model, optimizer, DATA, epoch)
        average.update_parameters(model)
        grower.step(loader(VALIDATION))
    average.eval()
    before = average(VALIDATION[0])
    grower.finish(keep=["stage1", "stage2"])
    assert [name for name, _ in average.module.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert torch.allclose(average(VALIDATION[0]), before, atol=1e-5)
    assert not equal(average.module.named_parameters(), model.named_parameters())
    train_epoch(model, optimizer, DATA, 3)
    average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


def test_averages_lose_what_is_dropped() -> None:
    """A seed that finish drops is dropped from the average too."""
    model, optimizer, grower = make(policy=BIRTHS)
    average = average_of(model)
    for epoch in range(2):
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
    grower.finish(keep=["stage1"], drop=["stage2"])
    names = [name for name, _ in average.module.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert any("stage1.grown" in name for name in names) and not any("stage2.grown" in name for name in names)


def test_averages_do_not_warn() -> None:
    """The search for averaged models touches nothing that warns."""
    model, optimizer, grower = make(policy=BIRTHS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average = average_of(model)
        train_epoch(model, optimizer, DATA)
        grower.step(loader(VALIDATION))
    assert average.module is not None
