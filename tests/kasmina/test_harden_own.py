"""Hardening what users bring: blueprints and hosts of their own, and what cannot be exported."""

from collections.abc import Callable

import pytest
import torch
from hardening import SIDE, close, cnn, count, images, plant, train
from torch import Tensor, nn
from torch.nn import functional as F
from user_blueprints import own_blueprints as own_blueprints

from esper.kasmina import BlueprintRegistry, Host, MorphogeneticModel, Segment
from esper.kasmina.export import ExportError
from esper.kasmina.layers import Conv2d, Linear, Scale, Statistics, named_statistics
from esper.kasmina.norms import BatchNorm2d
from esper.leyline import SlotSpec


def test_a_blueprint_of_the_user(own_blueprints: None) -> None:
    model = cnn()
    plant(model, "r0c0", "mixed", "gate")
    plant(model, "r0c1", "mixed")
    hardened = model.harden()
    close(hardened(images()), model(images()))
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count


@pytest.mark.parametrize(
    ("blueprint", "message"),
    [
        ("extended", "slot 'r0c0': Extended extends torch's Conv2d"),
        ("borrowing", "refers to 'BlueprintRegistry'"),
        ("recurrent", "nn.LSTM cannot be exported.*Compose"),
    ],
)
def test_what_cannot_be_exported_is_said(own_blueprints: None, blueprint: str, message: str) -> None:
    model = cnn()
    plant(model, "r0c0", blueprint)
    with pytest.raises(ExportError, match=message):
        model.harden()


class Noisy(nn.Module):
    """A layer that has to know whether it trains, but returns no statistics."""

    __call__: Callable[..., Tensor]

    def forward(self, h: Tensor, train: bool) -> Tensor:
        return F.dropout(h, 0.5, train)


class Residual(Segment):
    """A segment of the user's own, with statistics from two norms and a random layer."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first, self.second = Conv2d(inputs, width, 3), Conv2d(width, width, 3)
        self.norms = nn.ModuleList([BatchNorm2d(width), BatchNorm2d(width)])
        self.noise = Noisy()

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        statistics: Statistics = {}
        y, result = self.norms[0](self.first(h), train)
        statistics |= named_statistics("norms.0", result)
        z, result = self.norms[1](self.second(F.relu(y)), train)
        statistics |= named_statistics("norms.1", result)
        h = self.noise(y + z, train)
        return F.dropout(h, 0.1, train), statistics


class Top(Segment):
    """Class scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = Linear(width, 5)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return self.linear(h.mean((-2, -1))), {}


def test_a_host_of_the_user() -> None:
    torch.manual_seed(0)
    host = Host([Residual(3, 8), Top(8)], [SlotSpec("middle", 8, "image", 0.5, SIDE)])
    model = MorphogeneticModel(host)
    for step in range(5):
        model.train()(images(rng_seed=step) + 1)
    plant(model.eval(), "middle", "depthwise")
    hardened = model.harden()
    close(hardened(images()), model(images()))
    assert not torch.equal(hardened.train()(images()), hardened(images()))  # dropout is on in training
    losses = train(hardened, images(), torch.arange(8) % 5)
    assert losses[-1] < losses[0]


def test_shared_weights_are_refused() -> None:
    first, top = Residual(3, 8), Top(8)
    first.second = Conv2d(8, 8, 3)
    twice = Residual(8, 8)
    twice.second.weight = first.second.weight
    slots = [SlotSpec(f"r0c{index}", 8, "image", 0.5, SIDE) for index in range(2)]
    with pytest.raises(ExportError, match="share weights"):
        MorphogeneticModel(Host([first, twice, top], slots)).harden()


def test_a_class_from_within_a_function() -> None:
    factor = 3.0

    class Local(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = Scale(width)

        def forward(self, h: Tensor) -> Tensor:
            import math

            return self.scale(h * math.sqrt(factor))

    BlueprintRegistry.register("image", "local", lambda c: c)(Local)
    try:
        model = cnn()
        plant(model, "r0c0", "local")
        close(model.harden()(images()), model(images()))
    finally:
        BlueprintRegistry.unregister("image", "local")
