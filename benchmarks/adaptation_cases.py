"""A pretrained ResNet for CIFAR-10 and shifted copies of its data, for `adaptation.py`."""

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline import DataError
from esper.tolaria.data import ImageData, load

WEIGHTS = Path("resnet_cifar10") / "resnet20-12fca82f.th"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # that the weights were trained with
NOISE_SEED = 7


class BasicBlock(nn.Module):
    """Two 3×3 convolutions. The shortcut of a block with stride drops pixels and adds channels of zeros."""

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
    """Three stages of three blocks, with 16, 32 and 64 channels."""

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


def data_folder(given: Path | None) -> Path:
    """The folder of data sets: the given one, or that of ESPER_DATA."""
    folder = given or Path(os.environ.get("ESPER_DATA", "data"))
    if not (folder / WEIGHTS).is_file():
        raise DataError(f"{folder / WEIGHTS} is missing: put the pretrained weights there, or name another --data-dir")
    return folder


def pretrained(folder: Path) -> ResNet20:
    """The network with its weights; the file holds tensors alone."""
    content = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)["state_dict"]
    model = ResNet20()
    model.load_state_dict({name.removeprefix("module."): value for name, value in content.items()})
    return model


# -- shifts -----------------------------------------------------------------------------------------------------------


def _noise(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return (x + 0.15 * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def _blur(x: Tensor) -> Tensor:
    for _ in range(2):
        x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return x


def _pixelate(x: Tensor) -> Tensor:
    return F.interpolate(F.avg_pool2d(x, 4), scale_factor=4.0)


def _quadrants(x: Tensor) -> Tensor:
    top, bottom = x.split(16, 2)
    a, b = top.split(16, 3)
    c, d = bottom.split(16, 3)
    return torch.cat([torch.cat([d, c], 3), torch.cat([a, b], 3)], 2)


def _translate(x: Tensor) -> Tensor:
    return F.pad(x, (10, 0, 10, 0))[..., :32, :32]


def _same(x: Tensor) -> Tensor:
    return x


class Shift(NamedTuple):
    """How images (N, 3, 32, 32) between 0 and 1, and labels, differ from those of the pretraining."""

    images: Callable[[Tensor], Tensor]
    labels: Callable[[Tensor], Tensor] = _same


SHIFTS = {
    "noise": Shift(_noise),
    "blur": Shift(_blur),
    "contrast": Shift(lambda x: 0.5 + 0.25 * (x - 0.5)),
    "inversion": Shift(lambda x: 1 - x),
    "channels": Shift(lambda x: x[:, [2, 0, 1]]),
    "pixelation": Shift(_pixelate),
    "rotation": Shift(lambda x: x.rot90(1, (2, 3))),
    "translation": Shift(_translate),
    "quadrants": Shift(_quadrants),
    "labels": Shift(_same, lambda y: (3 * y + 1) % 10),
    "dim noise": Shift(lambda x: _noise(0.4 * x)),
    "inverted labels": Shift(lambda x: 1 - x, lambda y: (3 * y + 1) % 10),
}
"""By name"""


class Parts(NamedTuple):
    """Images and labels, on the device."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def read_images(folder: Path) -> tuple[Tensor, Tensor]:
    """The test split, which the pretraining did not see. Decoded images are cached on the disk."""
    data = load("cifar10", 5000, None, data_dir=folder)
    assert isinstance(data, ImageData)
    return data.test.images, data.test.labels


def parts_of(name: str, seed: int, sizes: tuple[int, int, int], folder: Path, device: str) -> Parts:
    """Shifted images for training, validation and test, drawn from the test split without overlap."""
    images, labels = read_images(folder)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    shift = SHIFTS[name]
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    parts = []
    for chosen in order[: sum(sizes)].split(list(sizes)):
        shifted = (shift.images(images[chosen].float() / 255) - mean) / deviation
        parts.append((shifted.to(device), shift.labels(labels[chosen].long()).to(device)))
    return Parts(*parts)
