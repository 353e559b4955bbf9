"""Small pretrained models whose backbone is frozen, and shifted data to adapt them to."""

import copy
from functools import cache
from typing import Any

import torch
from loops import digits, loader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from esper.grower import Grower

IMAGES, LABELS = digits(900)
TRAIN, VALIDATION = (1 - IMAGES[:500], LABELS[:500]), (1 - IMAGES[500:], LABELS[500:])
"""The inverse of what the models were trained on"""


class CNN(nn.Module):
    """Two stages with norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.stage2 = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stage2(self.stage1(x)).mean((2, 3)))
        return logits


@cache
def _pretrained() -> CNN:
    """Trained on the images as they are."""
    torch.manual_seed(0)
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(6):
        for batch in torch.randperm(500).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(IMAGES[:500][batch]), LABELS[:500][batch]).backward()
            optimizer.step()
    return model.eval()


def base() -> CNN:
    """The pretrained model, all of it trainable."""
    return copy.deepcopy(_pretrained())


def frozen_cnn() -> CNN:
    """The pretrained model with a frozen backbone."""
    model = base().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


class RMSNorm(nn.Module):
    """A norm without bias, as language models write their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    """Attention and a perceptron, with norms in front."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.silu(self.up(self.norm2(x))))
        return y


class FrozenGPT(nn.Module):
    """Characters to scores, with tied embeddings; only the last norm learns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.norm = RMSNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)
        self.norm.requires_grad_(True)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        scores: Tensor = self.head(self.norm(h))
        return scores


def text_batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Sequences that count upwards, and what follows each token."""
    starts = torch.randint(0, 20, (count, 8, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(9)) % 20
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def learning(model: nn.Module) -> Optimizer:
    """An optimizer of what is not frozen, as users build it."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train_epoch(model: nn.Module, optimizer: Optimizer, epoch: int = 0) -> None:
    """One pass over the shifted images in an order that depends on the epoch alone."""
    model.train()
    for batch in torch.randperm(500, generator=torch.Generator().manual_seed(epoch)).split(50):
        optimizer.zero_grad()
        F.cross_entropy(model(TRAIN[0][batch]), TRAIN[1][batch]).backward()
        optimizer.step()


def adapt(steps: int = 8, budget: int = 400, until: int | None = None, **options: Any) -> tuple[CNN, Grower, list[Any]]:
    """The frozen model after some steps of adaptation, its grower, and the records."""
    torch.manual_seed(0)
    model = frozen_cnn()
    optimizer = learning(model)
    grower = Grower(model, optimizer, budget=budget, steps=steps, **options)
    records = []
    for epoch in range(steps if until is None else until):
        train_epoch(model, optimizer, epoch)
        records.append(grower.step(loader(VALIDATION)))
    return model, grower, records


@torch.no_grad()
def outputs(model: nn.Module, inputs: Tensor = VALIDATION[0]) -> Tensor:
    """What a model computes in eval mode."""
    training = model.training
    scores: Tensor = model.eval()(inputs)
    model.train(training)
    return scores
