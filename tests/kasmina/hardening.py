"""Grown models to harden, and ways to compare, train and run what comes out."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import CNNHost, GPTHost, MorphogeneticModel, SeedState
from esper.kasmina.attach import attach
from esper.kasmina.blending import AlphaController
from esper.leyline import ACTIVE_STAGES, SeedStage

SIDE = 8
VOCAB, BLOCK = 11, 6


def images(count: int = 8, rng_seed: int = 0) -> Tensor:
    """Noise."""
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(rng_seed))


def tokens(count: int = 4) -> Tensor:
    """Ids at random."""
    return torch.randint(0, VOCAB, (count, BLOCK), generator=torch.Generator().manual_seed(0))


def cnn(*, masked: bool = False, slots: tuple[str, ...] | None = None) -> MorphogeneticModel:
    """A small host whose running statistics are no longer those of birth."""
    torch.manual_seed(0)
    model = MorphogeneticModel(CNNHost((8, 16), resolution=SIDE, classes=5, masked=masked), slots)
    for step in range(5):
        model.train()(3 * images(rng_seed=step) + 1)
    return model.eval()


def gpt(layers: int = 3) -> MorphogeneticModel:
    """A small language model."""
    torch.manual_seed(0)
    return MorphogeneticModel(GPTHost(layers, 8, 2, BLOCK, VOCAB)).eval()


class Foreign(nn.Module):
    """A network that knows nothing of slots."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.stem(x))
        scores: Tensor = self.head(h.mean((-2, -1)).to(self.head.weight.dtype))
        return scores


def attached() -> MorphogeneticModel:
    """Slots in a foreign network whose running statistics are no longer those of birth."""
    torch.manual_seed(0)
    widths = {"stem": 8, "stem.0": 8, "block": 8, "head": 5}
    model = attach(Foreign(), widths, example=images(2))
    for step in range(3):
        model.train()(images(rng_seed=step) + 1)
    return model.eval()


@torch.no_grad()
def plant(
    model: MorphogeneticModel,
    slot_id: str,
    blueprint: str,
    style: str = "add",
    *,
    stage: SeedStage = SeedStage.FOSSILIZED,
    alpha: float = 0.7,
) -> None:
    """A seed at the given stage, as if it had been trained: all its weights are noise."""
    alpha = alpha if stage in ACTIVE_STAGES else 0.0
    controller = AlphaController(alpha=alpha, start=alpha, target=alpha)
    state = SeedState(slot_id, stage, blueprint, style=style, controller=controller)
    slot = model.body.slot(slot_id)
    slot.plant(state, rng_seed=3, like=next(model.host_parameters()))
    for parameter in slot.parameters():
        parameter.normal_(std=0.4)


def close(hardened: Tensor, model: Tensor) -> None:
    """Equal but for the order of sums."""
    torch.testing.assert_close(hardened, model, rtol=1e-5, atol=1e-6)


def count(module: nn.Module) -> int:
    """Of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def train(network: nn.Module, x: Tensor, targets: Tensor, steps: int = 10) -> list[float]:
    """A few steps of SGD; the loss at each."""
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(network(x).flatten(0, -2), targets.flatten())
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


WITHOUT_ESPER = """
import sys
sys.modules["esper"] = None
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from safetensors.torch import load_file
from {source} import *
folder = Path(sys.argv[1])
known = load_file(folder / "known.safetensors")
{build}
with torch.no_grad():
    torch.testing.assert_close(network(known["x"]), known["y"], rtol=1e-5, atol=1e-6)
network.train()
optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
losses = []
for _ in range(10):
    optimiser.zero_grad()
    loss = torch.nn.functional.cross_entropy(network(known["x"]).flatten(0, -2), known["targets"].flatten())
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert not [name for name in sys.modules if name.startswith("esper.")]
print("parameters", sum(p.numel() for p in network.parameters()))
"""


def run_without_esper(folder: Path, source: str, build: str, x: Tensor, y: Tensor, targets: Tensor) -> int:
    """Equality and ten training steps in a process of its own; the number of parameters."""
    save_file({"x": x, "y": y.detach().contiguous(), "targets": targets}, folder / "known.safetensors")
    script = WITHOUT_ESPER.format(source=source, build=build)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])
