"""Foreign networks, a small ResNet and a small transformer of ordinary torch layers, and the lives of seeds in them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hosts import AT_ONCE
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import LifecycleConfig, MorphogeneticModel, attach
from esper.kasmina.slot import Isolation
from esper.leyline import SeedStage


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.skip(x))


class ResNet(nn.Module):
    """Images (B, 3, 8, 8) → 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(ResidualBlock(3, 8, 1))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2), ResidualBlock(16, 16, 1))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer2(self.layer1(x)).mean((-2, -1))
        logits: Tensor = self.head(self.dropout(h))
        return logits


class Transformer(nn.Module):
    """Tokens (B, T) → a score per entry of the vocabulary, (B, T, 11)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(ids)))
        return logits


def images(count: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise whose class is the brightest of four quadrants: something that a host can learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    quadrants = x.mean(1).reshape(count, 2, 4, 2, 4).mean((2, 4)).flatten(1)
    return x, quadrants.argmax(1)


def tokens(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, each followed by the next larger one modulo the vocabulary: the wanted answer."""
    ids = torch.randint(11, (count, 5), generator=torch.Generator().manual_seed(seed))
    return ids, (ids + 1) % 11


class Case:
    """A foreign host with its slots and data."""

    def __init__(
        self, make: type[nn.Module], slots: dict[str, int], blueprint: str, data: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        self.make, self.slots, self.blueprint, self.data = make, slots, blueprint, data
        self.first, self.second = slots

    def host(self) -> nn.Module:
        torch.manual_seed(3)
        return self.make()

    def model(self, isolation: Isolation = "shadow", *, config: LifecycleConfig | None = AT_ONCE) -> MorphogeneticModel:
        return attach(self.host(), self.slots, example=self.data()[0], isolation=isolation, config=config)


CASES = {
    "resnet": Case(ResNet, {"layer1": 8, "layer2": 16}, "conv_light", images),
    "transformer": Case(Transformer, {"encoder.layers.0": 16, "encoder.layers.1": 16}, "mlp_small", tokens),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each of them in turn."""
    return CASES[request.param]


def wake(model: MorphogeneticModel, slot_id: str) -> None:
    """Open the zero-initialised scale, so that the seed has an effect that can be seen."""
    for name, parameter in model.seed_slots[slot_id].named_parameters():
        if "scale" in name:
            nn.init.constant_(parameter, 0.3)


def stages(model: MorphogeneticModel, slot_id: str, blueprint: str, data: tuple[Tensor, Tensor]) -> Iterator[SeedStage]:
    """Walk one slot through every stage: up to a fossil in the first life, down to a prune in a second slot's."""
    yield SeedStage.DORMANT
    yield model.germinate_seed(slot_id, blueprint, tempo=3).target
    wake(model, slot_id)
    yield model.advance(slot_id).target
    model.observe_gradients({slot_id: 1.0})
    yield model.advance(slot_id).target
    for _ in range(2):
        model.tick()
        yield SeedStage.BLENDING
    model.tick()
    model.measure(*data, data[0])
    yield SeedStage.HOLDING
    yield model.fossilize(slot_id).target


def prune_life(model: MorphogeneticModel, slot_id: str, blueprint: str) -> Iterator[SeedStage]:
    """A seed that is cut, and its slot until it can be used again."""
    model.germinate_seed(slot_id, blueprint)
    wake(model, slot_id)
    model.advance(slot_id)
    model.observe_gradients({slot_id: 1.0})
    yield model.advance(slot_id).target
    while model.seed_slots[slot_id].state.ramping:
        model.tick()
    yield model.prune_seed(slot_id).target
    while model.seed_slots[slot_id].state.stage is not SeedStage.DORMANT:
        model.tick()
        yield model.seed_slots[slot_id].state.stage


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies, of the parameters that have one."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
