"""What a Grower costs that decides to do nothing, beyond one plain pass over the validation data.

    python benchmarks/grower_cost.py --pairs 30

Two copies of one model train on the same minibatches. After each epoch, one is validated by a plain loop, the other by
`grower.step` with the policy `wait`. The two take turns, and the one that goes first changes from pair to pair. The
ratio of whole epochs is bootstrapped over pairs.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness import RESULTS, print_table, write_result
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from esper.grower import Grower


class SmallResNet(nn.Module):
    """Three stages of a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.stages = nn.ModuleList([Block(16, 16), Block(16, 32), Block(32, 64)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for stage in self.stages:
            h = F.max_pool2d(stage(h), 2)
        logits: Tensor = self.head(h.mean((2, 3)))
        return logits


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Conv2d(inputs, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


Data = tuple[Tensor, Tensor]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, epoch: int) -> None:
    """One epoch."""
    model.train()
    for batch in torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(epoch)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0][batch]), data[1][batch]).backward()
        optimizer.step()


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """A plain pass."""
    model.eval()
    correct = sum(int((model(images).argmax(-1) == labels).sum()) for images, labels in loader)
    return correct / len(loader.dataset)  # type: ignore[arg-type]  # a TensorDataset has a length


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.rand(arguments.images, 3, 32, 32), torch.randint(0, 10, (arguments.images,))
    loader = DataLoader(TensorDataset(*(part[: arguments.images // 4] for part in data)), batch_size=128)
    plain = SmallResNet()
    grown = copy.deepcopy(plain)
    ways: dict[str, Callable[[int], None]] = {}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (plain, grown)]
    grower = Grower(grown, optimizers[1], budget=50_000, steps=arguments.pairs + 2, policy="wait")

    def plain_epoch(epoch: int) -> None:
        train(plain, optimizers[0], data, epoch)
        validate(plain, loader)

    def grown_epoch(epoch: int) -> None:
        train(grown, optimizers[1], data, epoch)
        grower.step(loader)

    ways = {"plain": plain_epoch, "grower": grown_epoch}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for pair in range(arguments.pairs + 1):
        for name in ways if pair % 2 else reversed(ways):
            start = time.perf_counter()
            ways[name](pair)
            seconds[name].append(time.perf_counter() - start)
    ratios = np.array([b / a for a, b in zip(seconds["plain"][1:], seconds["grower"][1:], strict=True)])
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(draws, 1), (0.025, 0.975))
    median = float(np.median(ratios))
    cells = [
        ["plain", statistics.median(seconds["plain"]) * 1e3],
        ["grower", statistics.median(seconds["grower"]) * 1e3],
    ]
    print_table("Epoch with validation", ["way", "median ms"], cells)
    print(f"\nratio {median:.4f}, 95 % interval {low:.4f} to {high:.4f}")
    result = {"pairs": arguments.pairs, "ratio": median, "low": float(low), "high": float(high), "seconds": seconds}
    write_result("grower_cost", result, arguments.out)


if __name__ == "__main__":
    main()
