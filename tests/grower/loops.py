"""Small models, data and loops of the kind that users have."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from esper.grower import Grower
from esper.grower.container import CHILD


def digits(count: int = 400) -> tuple[Tensor, Tensor]:
    """Real images (count, 1, 8, 8) and labels."""
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return images[:count].float().view(-1, 1, 8, 8) / 16, labels[:count]


class BlindCNN(nn.Module):
    """Two stages of 1×1 kernels, which cannot see shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(1, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.stage2 = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stage2(F.max_pool2d(self.stage1(x), 2)).mean((2, 3)))
        return logits


class MLP(nn.Module):
    """Two hidden layers with functional activations."""

    def __init__(self, inputs: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(inputs, 16), nn.Linear(16, 16), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.second(F.relu(self.first(x.flatten(1))))))
        return out


def sgd(model: nn.Module) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_epoch(model: nn.Module, optimizer: Optimizer, data: tuple[Tensor, Tensor], epoch: int = 0) -> None:
    """One pass in an order that depends on the epoch alone."""
    images, labels = data
    model.train()
    for batch in torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).split(50):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


def step_scheduler(scheduler: Any) -> None:
    """As a user does after an epoch."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def loader(data: tuple[Tensor, Tensor], size: int = 100) -> DataLoader[Any]:
    """A validation loader, as users have one."""
    return DataLoader(TensorDataset(*data), batch_size=size)


def make(seed: int = 0, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Optimizer, Grower]:
    """A model, its optimizer and its grower."""
    torch.manual_seed(seed)
    model = BlindCNN() if model is None else model
    optimizer = sgd(model)
    settings: dict[str, Any] = {"budget": 2000, "steps": 8, **options}
    return model, optimizer, Grower(model, optimizer, **settings)


def plan(*births: tuple[int, str, str]) -> Callable[[Any], list[tuple[str, ...]]]:
    """A policy that germinates (step, slot, blueprint) and does nothing else."""
    return lambda report: [("germinate", slot, name) for step, slot, name in births if step == report.step]


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def equal(one: Iterable[tuple[str, Tensor]], other: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether two lists of named tensors are equal to the bit."""
    first, second = dict(one), dict(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def through_disk(content: dict[str, Any]) -> dict[str, Any]:
    """Saved and loaded as users do, without an unrestricted pickle."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def spoil(model: nn.Module, value: float, slot: str = "stage2") -> None:
    """Set the weights of a seed."""
    with torch.no_grad():
        for parameter in getattr(model, CHILD)[slot].parameters():
            parameter.fill_(value)
