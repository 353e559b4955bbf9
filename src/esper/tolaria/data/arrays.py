"""Image sets as arrays: checks, pooling, statistics, and the split into parts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import BadValueError, DataError


class LabelledImages(NamedTuple):
    """Images (N, C, H, W) and their labels (N,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def take(self, indices: NDArray[np.int64]) -> "LabelledImages":
        """A copy of the samples at `indices`, in that order."""
        return LabelledImages(self.images[indices], self.labels[indices])


class ImageArrays(NamedTuple):
    """A published set: training images, test images, and class names in label order."""

    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]


def check_image_arrays(arrays: ImageArrays, where: object) -> ImageArrays:
    """Returns `arrays` if shapes, types and labels fit together; raises DataError naming `where` otherwise."""
    for part, (images, labels) in (("training", arrays.train), ("test", arrays.test)):
        if images.ndim != 4 or images.dtype != np.uint8 or not len(images):
            raise DataError(f"{where}: expected uint8 {part} images (N, C, H, W); got {images.dtype} {images.shape}")
        if labels.shape != images.shape[:1] or labels.dtype != np.int64:
            raise DataError(
                f"{where}: expected {len(images)} int64 {part} labels; got {labels.dtype} {tuple(labels.shape)}"
            )
        if labels.min() < 0 or labels.max() >= (count := len(arrays.classes)):
            raise DataError(f"{where}: expected {part} labels in 0..{count - 1}; got {labels.min()}..{labels.max()}")
    train, test = (part.images.shape[1:] for part in arrays[:2])
    if train != test:
        raise DataError(f"{where}: training images of {train} but test images of {test}")
    return arrays


def average_pool(images: NDArray[np.uint8], resolution: int) -> NDArray[np.uint8]:
    """Square images (N, C, H, H) averaged down to (N, C, resolution, resolution), rounded half to even."""
    count, channels, height, width = images.shape
    divisors = [size for size in range(1, height + 1) if height % size == 0]
    if height != width or resolution not in divisors:
        allowed = ", ".join(map(str, divisors)) if height == width else "none, as the images are not square"
        raise BadValueError(f"resolution {resolution} does not divide images of {height}×{width}; allowed: {allowed}")
    window = height // resolution
    if window == 1:
        return images
    windows = images.reshape(count, channels, resolution, window, resolution, window)
    pooled: NDArray[np.uint8] = np.rint(windows.sum(axis=(3, 5), dtype=np.uint32) / window**2).astype(np.uint8)
    return pooled


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images (N, C, H, W), for pixels scaled to 0..1."""
    # A histogram is exact, and needs no float copy of the images.
    histogram = torch.stack([channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]).numpy()
    levels = np.arange(256) / 255
    share = histogram / histogram.sum(axis=1, keepdims=True)
    mean = share @ levels
    deviation = np.sqrt((share * (levels - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(deviation.tolist())


SPLIT_SEED = 20240229
"""The seed of every split: the validation set does not depend on the seed of a run."""


def stratified_split(
    labels: NDArray[np.int64], sizes: tuple[int, ...], rng_seed: int = SPLIT_SEED
) -> tuple[NDArray[np.int64], ...]:
    """Disjoint index arrays of exactly `sizes` into `labels` (N,), with classes in proportion.

    In each part every class has its proportional count rounded down or up. Each part is in random order.
    """
    if labels.ndim != 1 or any(size < 0 for size in sizes):
        raise BadValueError(f"labels must have shape (N,), sizes must not be negative; got {labels.shape} and {sizes}")
    if sum(sizes) > len(labels):
        asked = " + ".join(map(str, sizes))
        raise DataError(f"asked for {asked} = {sum(sizes)} samples out of {len(labels)}; ask for fewer")
    draws = np.random.PCG64(rng_seed).random_raw(len(labels))
    order = np.argsort(draws, kind="stable")
    _, classes, class_counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    counts = _allot(class_counts.tolist(), (*sizes, len(labels) - sum(sizes)))  # the last part is not returned

    part_of = np.empty(len(labels), np.int64)  # of each entry of `order`
    for index, by_part in enumerate(zip(*counts, strict=True)):
        part_of[classes == index] = np.repeat(np.arange(len(counts)), by_part)
    return tuple(order[part_of == part].astype(np.int64) for part in range(len(sizes)))


def _allot(class_counts: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Counts (parts, classes) with the given row and column sums, each the proportional count rounded down or up.

    Every part starts with the counts rounded down; its missing samples come from the classes of largest remainder.
    Where parts compete for a class, an augmenting path moves an earlier choice. That always succeeds: the proportional
    counts solve this flow problem in fractions, so an integer solution exists.
    """
    total = sum(class_counts)
    counts = [[size * count // total for count in class_counts] for size in sizes]
    remainders = [[size * count % total for count in class_counts] for size in sizes]
    room = [count - sum(row[index] for row in counts) for index, count in enumerate(class_counts)]
    holders: list[list[int]] = [[] for _ in class_counts]  # the parts that round this class up

    def claim(part: int, visited: set[int]) -> bool:
        by_remainder = sorted(range(len(class_counts)), key=lambda index: -remainders[part][index])
        for index in by_remainder:
            if not remainders[part][index] or index in visited or part in holders[index]:
                continue
            visited.add(index)
            if len(holders[index]) < room[index]:
                holders[index].append(part)
                return True
            for other in holders[index]:
                if claim(other, visited):
                    holders[index].remove(other)
                    holders[index].append(part)
                    return True
        return False

    for part, size in enumerate(sizes):
        for _ in range(size - sum(counts[part])):
            claimed = claim(part, set())
            assert claimed, "an integer solution exists"
    for index, parts in enumerate(holders):
        for part in parts:
            counts[part][index] += 1
    return counts
