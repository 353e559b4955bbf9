"""Mistakes: errors that name the value and the remedy, and a model that stays as it was."""

import copy
from typing import Any

import pytest
import torch
from loops import BlindCNN, digits, equal, loader, make, plan, sgd, train_epoch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower import Grower
from esper.grower.container import CHILD
from esper.leyline import BadValueError, HostMismatchError, StageError, UnknownNameError

DATA = digits(200)


class Twice(nn.Module):
    """Runs one layer twice and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.never = (nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.again(self.again(F.relu(self.first(x.flatten(1))))))
        return out


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (BlindCNN, {"slots": {"stage9": 8}}, UnknownNameError, "stage9"),
        (BlindCNN, {"slots": {"stage1": 9}}, HostMismatchError, "declared with width 9"),
        (BlindCNN, {"slots": {}}, BadValueError, "at least one slot"),
        (BlindCNN, {"slots": ["stage1", "stage1"]}, BadValueError, "stage1 are named twice"),
        (Twice, {"slots": {"again": 64}}, HostMismatchError, "ran 2 times"),
        (Twice, {"slots": {"never": 64}}, HostMismatchError, "ran 0 times"),
        (BlindCNN, {"budget": 3}, BadValueError, "too small"),
        (BlindCNN, {"budget": 0}, BadValueError, "budget"),
        (BlindCNN, {"steps": 0}, BadValueError, "steps"),
        (BlindCNN, {"policy": "no_such_rule"}, UnknownNameError, "no_such_rule"),
        (BlindCNN, {"loss": 3}, BadValueError, "loss is a int"),
    ],
)
def test_refused(model: type[nn.Module], options: dict[str, Any], error: type[Exception], message: str) -> None:
    """At once, or at the first forward pass; no weight has changed, and the model still runs."""
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = sgd(net)
    groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
    with pytest.raises(error, match=message):
        Grower(net, optimizer, **{"budget": 1000, "steps": 8, **options})
        net(DATA[0])
    assert equal(before.items(), net.state_dict().items())
    assert optimizer.param_groups == groups
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert net(DATA[0]).shape == (200, 10)
    Grower(net, optimizer, budget=1000)  # the way is free for a second try


def test_steps_before_training() -> None:
    """A model that never ran has no slots yet."""
    _model, _, grower = make()
    with pytest.raises(StageError, match="has not run yet"):
        grower.step(loader(DATA))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "yielded no batch"),
        ([(DATA[0], torch.full_like(DATA[1], -100))], "no validation sample counts"),
        ([(DATA[0] * torch.nan, DATA[1])], "not finite for 200 of 200"),
    ],
)
def test_nothing_to_measure(batches: list[Any], message: str) -> None:
    """Model, optimizer and modes stay as they were, and the next step is the first."""
    model, optimizer, grower = make()
    train_epoch(model, optimizer, DATA)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(BadValueError, match=message):
        grower.step(batches)
    assert equal(before.items(), model.state_dict().items())
    assert str(settings) == str(optimizer.state_dict())
    assert all(part.training for part in model.modules())
    assert grower.step(loader(DATA)).step == 1


def test_nan_from_the_loss() -> None:
    """Counted and refused; the next step works."""
    bad = True

    def loss(output: Tensor, batch: Any) -> Tensor:
        losses = F.cross_entropy(output, batch[1], reduction="none")
        return losses * torch.nan if bad else losses

    model, optimizer, grower = make(loss=loss)
    train_epoch(model, optimizer, DATA)
    with pytest.raises(BadValueError, match="not finite for 200 of 200"):
        grower.step(loader(DATA))
    bad = False
    assert grower.step(loader(DATA)).step == 1


def test_actions_that_are_none() -> None:
    """A policy of one's own makes a mistake."""
    for returned, message in [
        (["germinate stage1"], "the policy returned"),
        ([("grow", "stage1")], "the policy returned"),
    ]:
        model, optimizer, grower = make(policy=lambda report, returned=returned: returned)
        train_epoch(model, optimizer, DATA)
        with pytest.raises(BadValueError, match=message):
            grower.step(loader(DATA))


def test_the_wrong_optimizer() -> None:
    """One that holds the parameters but is not the one that the loop steps."""
    torch.manual_seed(0)
    model = BlindCNN()
    stepped, unused = sgd(model), sgd(model)
    grower = Grower(model, unused, budget=2000, steps=8, policy=plan((1, "stage1", "conv_light")))
    train_epoch(model, stepped, DATA)
    grower.step(loader(DATA))
    train_epoch(model, stepped, DATA, 1)
    with pytest.raises(BadValueError, match="never updated"):
        grower.step(loader(DATA))


@pytest.mark.parametrize("reason", ["rate", "accumulation"])
def test_a_seed_that_waits_for_its_first_update(reason: str) -> None:
    """A rate of zero, or gradients that are still accumulated, are no wrong optimizer: no parameter has changed."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    train_epoch(model, optimizer, DATA)
    grower.step(loader(DATA))
    for epoch in range(2):
        if reason == "rate":
            optimizer.param_groups[0]["lr"] = 0.0
            train_epoch(model, optimizer, DATA, epoch)
            optimizer.param_groups[0]["lr"] = 0.05  # what a scheduler sets before the next step
        else:
            F.cross_entropy(model(DATA[0]), DATA[1]).backward()
        grower.step(loader(DATA))
    train_epoch(model, optimizer, DATA, 3)
    grower.step(loader(DATA))
    assert all(bool(parameter.any()) for parameter in getattr(model, CHILD).parameters())


def test_a_seed_without_gradient() -> None:
    """The loop has frozen it."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    train_epoch(model, optimizer, DATA)
    grower.step(loader(DATA))
    model.train()
    for parameter in getattr(model, CHILD).parameters():
        parameter.requires_grad_(False)
    train_epoch(model, optimizer, DATA, 1)
    with pytest.raises(BadValueError, match="got no gradient"):
        grower.step(loader(DATA))


def test_after_the_end() -> None:
    """A finished grower does nothing more."""
    model, optimizer, grower = make(policy="wait")
    train_epoch(model, optimizer, DATA)
    grower.step(loader(DATA))
    grower.finish()
    with pytest.raises(StageError, match="finished"):
        grower.step(loader(DATA))
    with pytest.raises(StageError, match="finished"):
        grower.finish()


def test_tokens_first() -> None:
    """(tokens, batch, channels) is not taken for (batch, tokens, channels)."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)
    )
    grower = Grower(model, sgd(model), budget=5000, steps=8, slots={"1.layers.0": 16})
    with pytest.raises(HostMismatchError, match="batch_first"):
        model(torch.randn(5, 3, 8))
    assert grower is not None
