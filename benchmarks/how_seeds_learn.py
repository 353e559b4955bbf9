"""Three ways in which a seed can learn inside somebody's own loop, compared at a fixed plan.

- `direct`: it acts in the main row from birth; its scale is zero, so nothing jumps.
- `straight_through`: it learns from the main row's gradient without acting, then blends in.
- `shadow`: it learns in a second pass with its own loss, then blends in.

    python benchmarks/how_seeds_learn.py --seeds 5

Every run germinates the same seeds after the first epoch. Test accuracy at the end, in points over the same model
without seeds, paired by seed. A CNN and an MLP on Fashion-MNIST, halved to 14×14.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from harness import RESULTS, Json, print_table, write_result
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import GrowingOptimizer, LifecycleConfig, MorphogeneticModel, attach
from esper.kasmina.slot import Isolation
from esper.leyline import SeedStage
from esper.tolaria.data.directory import data_directory
from esper.tolaria.data.readers import read_idx

WAYS = ("none", "direct", "straight_through", "shadow")
TRAINING_EPOCHS = 3  # before a seed that does not act from birth is blended in


class Case(NamedTuple):
    """A model and the seeds that grow in it."""

    build: type[nn.Module]
    plan: dict[str, str]
    widths: dict[str, int]


class SmallCNN(nn.Module):
    """Two stages of a convolution, far too small for the task."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.stage2 = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stage2(F.max_pool2d(self.stage1(x), 2))
        logits: Tensor = self.head(h.mean((2, 3)))
        return logits


class SmallMLP(nn.Module):
    """Two hidden layers of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(196, 16), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer2(self.layer1(x.flatten(1))))
        return logits


CASES = {
    "cnn": Case(SmallCNN, {"stage1": "conv_light", "stage2": "conv_light"}, {"stage1": 8, "stage2": 16}),
    "mlp": Case(SmallMLP, {"layer1": "mlp_small", "layer2": "mlp_small"}, {"layer1": 16, "layer2": 16}),
}


def load(folder: Path, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 14, 14) in [0, 1] and labels."""
    images = (
        torch.tensor(read_idx(folder / f"{split}-images-idx3-ubyte.gz", dimensions=3)[:count]).float().unsqueeze(1)
        / 255
    )
    labels = torch.tensor(read_idx(folder / f"{split}-labels-idx1-ubyte.gz", dimensions=1)[:count]).long()
    return F.avg_pool2d(images, 2), labels


def steer(model: MorphogeneticModel, plan: dict[str, str], epoch: int) -> None:
    """Germinate after the first epoch; blend seeds in once they have trained."""
    for slot_id, blueprint in plan.items():
        if epoch == 1:
            model.germinate_seed(slot_id, blueprint)
        elif model.seed_slots[slot_id].state.stage is SeedStage.TRAINING and epoch > TRAINING_EPOCHS:
            model.advance(slot_id)


def train(case: Case, way: str, rng_seed: int, data: Sequence[Tensor], epochs: int) -> float:
    """Test accuracy, in percent, after training one model."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(rng_seed)
    net = case.build()
    isolation: Isolation = "straight_through" if way == "straight_through" else "shadow"
    config = LifecycleConfig(act_from_birth=way == "direct")
    model = attach(net, case.widths, example=images[:2], isolation=isolation, config=config, rng_seed=rng_seed)
    optimizer = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), clip_norm=1.0)
    generator = torch.Generator().manual_seed(rng_seed)
    for epoch in range(epochs):
        if way != "none":
            steer(model, case.plan, epoch)
        rate = 0.1 * min(1.0, 3 * (1 - epoch / epochs) + 0.1)
        for group in optimizer.wrapped.param_groups:
            group["lr"] = rate
        for batch in torch.randperm(len(images), generator=generator).split(128):
            optimizer.zero_grad()
            losses = model.losses(images[batch], labels[batch])
            torch.stack(list(losses.values())).sum().backward()
            optimizer.step()
        model.tick()
    model.eval()
    with torch.no_grad():
        return 100 * float((model(test_images).argmax(-1) == test_labels).float().mean())


def main() -> None:
    """Train, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = data_directory(arguments.data_dir) / "fashion_mnist"
    data = (*load(folder, "train", arguments.images), *load(folder, "t10k", 10_000))
    result: dict[str, Json] = {}
    rows = []
    for name, case in CASES.items():
        scores: dict[str, list[float]] = {}
        for way in WAYS:
            start = time.perf_counter()
            scores[way] = [train(case, way, seed, data, arguments.epochs) for seed in range(arguments.seeds)]
            gains = [a - b for a, b in zip(scores[way], scores["none"], strict=True)]
            deviation = statistics.stdev(gains) if len(gains) > 1 else 0.0
            seconds = (time.perf_counter() - start) / arguments.seeds
            rows.append(
                [name, way, statistics.fmean(scores[way]), f"{statistics.fmean(gains):+.2f} ± {deviation:.2f}", seconds]
            )
            print(rows[-1], flush=True)
        result[name] = dict(scores)
    print_table("How seeds learn", ["model", "way", "accuracy %", "points over no seeds", "seconds"], rows)
    write_result("how_seeds_learn", result, arguments.out)


if __name__ == "__main__":
    main()
