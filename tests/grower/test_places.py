"""Where slots are put by themselves: behind blocks that run once and return one tensor, never behind the head."""

import pytest
import torch
from loops import MLP, BlindCNN, sgd
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower import Grower
from esper.grower.places import Places
from esper.leyline import BadValueError


def chosen(model: nn.Module, *inputs: Tensor) -> list[str]:
    """Names of the submodules with a slot."""
    return [spec.slot_id for spec, _ in Places(model, inputs, {}).choose()]


class Block(nn.Module):
    """A transformer block, which may return a tuple as some libraries do."""

    def __init__(self, width: int, as_tuple: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.as_tuple = as_tuple

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor]:
        x = x + self.attention(x, x, x)[0]
        y: Tensor = x + self.mlp(x)
        return (y,) if self.as_tuple else y


class GPT(nn.Module):
    """Tokens to scores, with tied embeddings."""

    def __init__(self, blocks: int, as_tuple: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList([Block(16, as_tuple) for _ in range(blocks)])
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
            h = h[0] if isinstance(h, tuple) else h
        scores: Tensor = self.head(h)
        return scores


TOKENS = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(0))


def test_stages_of_a_cnn() -> None:
    """The stages, not their layers, and not the head."""
    assert chosen(BlindCNN(), torch.rand(2, 1, 8, 8)) == ["stage1", "stage2"]


def test_wrapped_stages() -> None:
    """Containers of one part are opened until there are several."""
    stages = BlindCNN()
    body = nn.Sequential(
        nn.Sequential(nn.Sequential(stages.stage1, stages.stage2, nn.Sequential(nn.Conv2d(16, 16, 1))))
    )
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    assert chosen(model, torch.rand(2, 1, 8, 8)) == ["0.0.0.0", "0.0.0.1", "0.0.0.2"]


def test_layers_of_an_mlp() -> None:
    """Without blocks, behind the last layer before the next one that mixes channels."""
    assert chosen(MLP(), torch.rand(2, 64)) == ["first", "second"]
    flat = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    assert chosen(flat, torch.rand(2, 8)) == ["2", "4"]


def test_at_most_eight() -> None:
    """Spread evenly, first and last included."""
    names = chosen(GPT(12), TOKENS)
    assert len(names) == 8 and names[0] == "blocks.0" and names[-1] == "blocks.11"


def test_blocks_that_return_tuples() -> None:
    """Their parts that return one tensor are used instead."""
    assert chosen(GPT(3, as_tuple=True), TOKENS) == ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]


class Recurrent(nn.Module):
    """Only a layer that runs at every position, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = F.relu(self.cell(h) + x[:, t])
        scores: Tensor = self.head(h)
        return scores


def test_nowhere() -> None:
    """The error asks for names."""
    with pytest.raises(BadValueError, match="name the slots yourself"):
        chosen(Recurrent(), torch.rand(2, 3, 4))


def test_tied_weights() -> None:
    """A parameter that two modules share is the user's, once; the model grows and ends as usual."""
    torch.manual_seed(0)
    model = GPT(2)
    optimizer = sgd(model)
    grower = Grower(
        model,
        optimizer,
        budget=3000,
        steps=8,
        policy=lambda report: [("germinate", "blocks.0", "lora")] * (report.step == 1),
    )
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        optimizer.step()
        grower.step([(TOKENS[:, :-1], TOKENS[:, 1:])])
    model.eval()
    before = model(TOKENS)
    grower.finish(keep=["blocks.0"])
    assert model.head.weight is model.embedding.weight
    assert torch.allclose(model(TOKENS), before, atol=1e-6)
