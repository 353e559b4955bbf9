"""A pretrained ResNet-20 learns to see negatives: its backbone is frozen, and an adapter grows beside it.

    ESPER_DATA=... python examples/adapt_resnet.py

The folder of ESPER_DATA holds CIFAR-10 (its archive, or images in class folders) and `resnet_cifar10` with the weights
of github.com/akamaster/pytorch_resnet_cifar10. The network was trained on ordinary images and gets inverted ones. The
adapter is saved, loaded into a fresh copy of the pretrained network, and merged into its weights.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.tolaria.data import ImageData, load

WEIGHTS = Path("resnet_cifar10") / "resnet20-12fca82f.th"
MEAN, DEVIATION = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions. The shortcut drops pixels and adds channels of zeros, as the weights expect it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more))
        return F.relu(y + x)


class ResNet20(nn.Module):
    """Three stages of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(BasicBlock(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1), BasicBlock(32, 32, 1))
        self.layer3 = nn.Sequential(BasicBlock(32, 64, 2), BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        logits: Tensor = self.linear(h.mean((2, 3)))
        return logits


def pretrained(folder: Path) -> ResNet20:
    """The network with its weights. `weights_only` refuses anything but tensors."""
    content = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)["state_dict"]
    model = ResNet20()
    model.load_state_dict({name.removeprefix("module."): value for name, value in content.items()})
    return model


def negatives(folder: Path, sizes: tuple[int, int, int]) -> list[TensorDataset]:
    """Inverted images of the test split, which the pretraining did not see: to train, to validate and to test."""
    data = load("cifar10", 5000, None, data_dir=folder)
    assert isinstance(data, ImageData)
    order = torch.randperm(len(data.test.images), generator=torch.Generator().manual_seed(0))
    return [
        TensorDataset((1 - data.test.images[part].float() / 255 - MEAN) / DEVIATION, data.test.labels[part])
        for part in order[: sum(sizes)].split(list(sizes))
    ]


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Accuracy in percent."""
    model.eval()
    hits = [model(x).argmax(1) == y for x, y in DataLoader(data, batch_size=200)]
    return 100 * float(torch.cat(hits).float().mean())


def adapt(model: nn.Module, data: list[TensorDataset], epochs: int, budget: int) -> esper.Grower:
    """The user's own loop. Only the head is trainable, until seeds join the optimizer."""
    torch.manual_seed(0)
    model.requires_grad_(False)
    head = model.get_submodule("linear").requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    grower = esper.Grower(model, optimizer, budget=budget, steps=epochs)
    for _ in range(epochs):
        model.train()
        for x, y in DataLoader(data[0], batch_size=50, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
        print(grower.step(DataLoader(data[1], batch_size=200)))
    return grower


def main() -> None:
    """Adapt, save, load into a fresh copy, merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("ESPER_DATA", "data")))
    parser.add_argument("--images", type=int, nargs=3, default=[1000, 500, 2000], help="to train, validate and test")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--budget", type=int, default=2_700, help="parameters of the adapter; the network has 269,722")
    parser.add_argument("--out", type=Path, default=Path("adapter"))
    arguments = parser.parse_args()
    first, second, third = arguments.images
    data = negatives(arguments.data_dir, (first, second, third))
    model = pretrained(arguments.data_dir)
    print(f"pretrained: {accuracy(model, data[2]):.1f} % of the test images")
    grower = adapt(model, data, arguments.epochs, arguments.budget)
    grower.save(arguments.out)
    print(f"adapted: {accuracy(model, data[2]):.1f} %")

    fresh = pretrained(arguments.data_dir)
    merged = esper.Grower.load_adapter(fresh, arguments.out).merge()
    print(f"merged into a fresh copy: {accuracy(merged, data[2]):.1f} %, with the names of the pretrained network")


if __name__ == "__main__":
    main()
