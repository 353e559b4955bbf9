"""Four small models of a user's own with their data and recipes, for `own_models.py`.

- `cnn`: residual blocks on CIFAR-10 (or its JPEG copy); SGD, one cycle, random crops and flips.
- `gpt`: a character GPT on tiny Shakespeare; AdamW, one cycle.
- `mlp`: three hidden layers on Fashion-MNIST; AdamW, cosine.
- `regression`: the lower half of a Fashion-MNIST image from its upper half; AdamW, cosine.

All data lies on the device, and an epoch is shuffled and augmented there in one go.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from esper.tolaria.data import ImageData, TextData, load

CONTEXT = 64  # characters that the GPT sees
HEADS = 4
PADDING = 4  # pixels of a random crop
EVALUATED = 1000  # samples per batch without gradients

Batches = list[tuple[Tensor, Tensor]]


def _layer(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU())


class MLP(nn.Module):
    """Three hidden layers of one width."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_layer(inputs, width), _layer(width, width), _layer(width, width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(x))
        return output


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(inputs, outputs, stride), _conv(outputs, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A stem and three residual blocks, each with twice the channels of the one before."""

    def __init__(self, width: float) -> None:
        super().__init__()
        first, second, third = (round(factor * width) for factor in (1, 2, 4))
        self.stem = nn.Sequential(_conv(3, first), nn.ReLU())
        self.stage1 = ResidualBlock(first, first, 1)
        self.stage2 = ResidualBlock(first, second, 2)
        self.stage3 = ResidualBlock(second, third, 2)
        self.head = nn.Linear(third, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stage3(self.stage2(self.stage1(self.stem(x)))).mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """A transformer block with norms in front."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """Three blocks on characters."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


# -- data -------------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Everything of one case, on the device. Texts are characters (n,) without targets."""

    train: tuple[Tensor, ...]
    validation: Batches
    test: Batches


def load_images(name: str, folder: Path | None, samples: int | None, device: str) -> Data:
    """Normalised images and labels."""
    data = load(name, 5000, samples, data_dir=folder)
    assert isinstance(data, ImageData)
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (data.mean, data.std))
    train, validation, test = (
        ((part.images.to(device).float() / 255 - mean) / std, part.labels.to(device))
        for part in (data.train, data.validation, data.test)
    )
    return Data(train, _batches(*validation), _batches(*test))


def load_vectors(name: str, folder: Path | None, samples: int | None, device: str) -> Data:
    """Images as vectors, and labels."""
    train, *others = load_images(name, folder, samples, device)
    validation, test = ([(images.flatten(1), labels) for images, labels in part] for part in others)
    return Data((train[0].flatten(1), train[1]), validation, test)


def load_halves(name: str, folder: Path | None, samples: int | None, device: str) -> Data:
    """The upper halves of images, and the lower ones as targets, as vectors."""
    train, *others = load_vectors(name, folder, samples, device)
    validation, test = ([(pixels[:, :392], pixels[:, 392:]) for pixels, _ in part] for part in others)
    return Data((train[0][:, :392], train[0][:, 392:]), validation, test)


def load_text(name: str, folder: Path | None, samples: int | None, device: str) -> Data:
    """Characters to train on, and windows of them to evaluate."""
    data = load(name, 20_000, samples, data_dir=folder)
    assert isinstance(data, TextData)
    windows = [_batches(*_windows(part.to(device), 0)) for part in (data.validation, data.test)]
    return Data((data.train.to(device),), *windows)


def _batches(inputs: Tensor, targets: Tensor) -> Batches:
    return list(zip(inputs.split(EVALUATED), targets.split(EVALUATED), strict=True))


def _windows(text: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Neighbouring windows of characters, and the characters that follow each."""
    count = (len(text) - start - 1) // CONTEXT
    inputs, targets = (text[first : first + count * CONTEXT].view(count, CONTEXT) for first in (start, start + 1))
    return inputs, targets


def longest_epoch(train: tuple[Tensor, ...], size: int) -> int:
    """Minibatches of an epoch. An epoch of text may have one less, by its random start."""
    samples = (len(train[0]) - 1) // CONTEXT if len(train) == 1 else len(train[0])
    return -(-samples // size)


def shuffled(train: tuple[Tensor, ...], size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches of one epoch: images are cropped and flipped, texts cut into windows from a random start."""
    device = generator.device
    if len(train) == 1:
        start = int(torch.randint(CONTEXT, (), generator=generator, device=device))
        inputs, targets = _windows(train[0], start)
    else:
        inputs, targets = train
    order = torch.randperm(len(inputs), generator=generator, device=device)
    inputs, targets = inputs[order], targets[order]
    if inputs.dim() == 4:
        inputs = crop_and_flip(inputs, generator)
    yield from zip(inputs.split(size), targets.split(size), strict=True)


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to four pixels and mirror half of them."""
    count, channels, height, width = images.shape
    device = images.device
    shifts = torch.randint(2 * PADDING + 1, (2, count, 1), generator=generator, device=device)
    flipped = torch.rand(count, 1, generator=generator, device=device) < 0.5
    rows, columns = (shift + torch.arange(size, device=device) for shift, size in zip(shifts, (height, width)))  # noqa: B905
    columns = torch.where(flipped, columns.flip(1), columns)
    each = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return F.pad(images, [PADDING] * 4)[each, channel, rows[:, None, :, None], columns[:, None, None, :]]


# -- losses and recipes -----------------------------------------------------------------------------------------------


def per_label(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy per sample or token."""
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="none")


def squared(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error per sample."""
    return F.mse_loss(output, batch[1], reduction="none").mean(1)


def _sgd(model: nn.Module, fused: bool) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused)


def _adamw(rate: float) -> Callable[[nn.Module, bool], Optimizer]:
    return lambda model, fused: AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=fused)


def _one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    peak = optimizer.param_groups[0]["lr"]
    return OneCycleLR(optimizer, peak, total_steps=steps + 1, pct_start=0.15, cycle_momentum=False)


class Case(NamedTuple):
    """A model, its data, its recipe, and a budget that about doubles it."""

    build: Callable[[float], nn.Module]
    """By width, which need not be whole"""
    width: float
    budget: int
    load: Callable[[Path | None, int | None, str], Data]
    """From a folder, with the number of training samples (or None for all), to a device"""
    losses: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
    by_loss: bool
    """Whether the score is the loss instead of the accuracy"""
    optimizer: Callable[[nn.Module, bool], Optimizer]
    schedule: Callable[[Optimizer, int], LRScheduler]
    epochs: int
    batch: int


CASES = {
    "cnn": Case(
        build=SmallResNet,
        width=8,
        budget=20_000,
        load=lambda *given: load_images("cifar10", *given),
        losses=per_label,
        by_loss=False,
        optimizer=_sgd,
        schedule=_one_cycle,
        epochs=30,
        batch=128,
    ),
    "gpt": Case(
        build=lambda width: GPT(HEADS * round(width / HEADS), 65),
        width=48,
        budget=90_000,
        load=lambda *given: load_text("tinyshakespeare", *given),
        losses=per_label,
        by_loss=True,
        optimizer=_adamw(3e-3),
        schedule=_one_cycle,
        epochs=20,
        batch=64,
    ),
    "mlp": Case(
        build=lambda width: MLP(784, round(width), 10),
        width=64,
        budget=60_000,
        load=lambda *given: load_vectors("fashion_mnist", *given),
        losses=per_label,
        by_loss=False,
        optimizer=_adamw(2e-3),
        schedule=CosineAnnealingLR,
        epochs=20,
        batch=128,
    ),
    "regression": Case(
        build=lambda width: MLP(392, round(width), 392),
        width=64,
        budget=60_000,
        load=lambda *given: load_halves("fashion_mnist", *given),
        losses=squared,
        by_loss=True,
        optimizer=_adamw(2e-3),
        schedule=CosineAnnealingLR,
        epochs=20,
        batch=128,
    ),
}
