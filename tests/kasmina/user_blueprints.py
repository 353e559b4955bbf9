"""Blueprints as users write them: one that can be exported, and three that cannot."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hardening import count
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import BlueprintRegistry
from esper.kasmina.layers import Conv2d, Scale

LEAK = 0.2


def leaky(h: Tensor) -> Tensor:
    """A function of the user's own, with a constant of the user's own."""
    return F.leaky_relu(h, LEAK)


class Mixed(nn.Module):
    """Layers of torch, layers of Esper, a parameter, a buffer, a constant, a function and a method."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(1, width), nn.GELU())
        self.branches = nn.ModuleList([nn.Conv2d(width, width, 1), Conv2d(width, width, 3)])
        self.weight = nn.Parameter(torch.zeros(width, 1, 1))
        self.register_buffer("table", torch.linspace(0, 1, width)[:, None, None], persistent=False)
        self.power, self.activation = 2, F.silu
        self.never: nn.Module | None = None
        self.scale = Scale(width)

    def mix(self, h: Tensor) -> Tensor:
        return sum((branch(h) for branch in self.branches), start=h * self.table**self.power)

    def forward(self, h: Tensor) -> Tensor:
        h = self.mix(self.activation(leaky(self.stem(h))))
        if self.never is not None:
            h = self.never(h)
        return self.scale(h + self.weight)


class Extended(nn.Conv2d):
    """Not exportable: its constructor is not known."""


class Borrowing(nn.Module):
    """Not exportable: it refers to an object that a file cannot have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(h * len(BlueprintRegistry.names("image")))


class Recurrent(nn.Module):
    """Not exportable: a layer of torch whose constructor cannot be read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width, width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(h)


@pytest.fixture
def own_blueprints() -> Iterator[None]:
    """Registered for one test."""
    own = {
        "mixed": Mixed,
        "extended": lambda width: Extended(width, width, 1),
        "borrowing": Borrowing,
        "recurrent": Recurrent,
    }

    def counter(build: Callable[[int], nn.Module]) -> Callable[[int], int]:
        return lambda width: count(build(width))

    for name, build in own.items():
        BlueprintRegistry.register("image", name, counter(build))(build)
    yield
    for name in own:
        BlueprintRegistry.unregister("image", name)
