"""What the readers of images return, and the few operations on whole sets of pixels."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import BadValueError, DataError

CHUNK_IMAGES = 4096


class LabelledImages(NamedTuple):
    """Images (N, C, H, W) and their labels (N,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def take(self, indices: NDArray[np.int64]) -> "LabelledImages":
        """A copy of the samples at `indices`, in that order."""
        return LabelledImages(self.images[indices], self.labels[indices])


class ImageArrays(NamedTuple):
    """A set as it is published: its training and its test images, and its class names in label order."""

    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]


def check_image_arrays(arrays: ImageArrays, where: object) -> ImageArrays:
    """Return `arrays` when shapes, types and labels fit together; DataError naming `where` otherwise."""
    for part, (images, labels) in (("training", arrays.train), ("test", arrays.test)):
        if images.ndim != 4 or images.dtype != np.uint8:
            raise DataError(
                f"{where}: {part} images must be uint8 (N, C, H, W); found {images.dtype} {tuple(images.shape)}"
            )
        if labels.shape != (len(images),) or labels.dtype != np.int64:
            raise DataError(
                f"{where}: {len(images)} {part} images need as many int64 labels; "
                f"found {labels.dtype} {tuple(labels.shape)}"
            )
        if not len(images):
            raise DataError(f"{where}: holds no {part} images")
        if labels.min() < 0 or labels.max() >= len(arrays.classes):
            raise DataError(
                f"{where}: {part} labels must lie in 0..{len(arrays.classes) - 1}; found {labels.min()}..{labels.max()}"
            )
    if arrays.train.images.shape[1:] != arrays.test.images.shape[1:]:
        raise DataError(
            f"{where}: training images of {arrays.train.images.shape[1:]} "
            f"but test images of {arrays.test.images.shape[1:]}"
        )
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
    pooled = np.empty((count, channels, resolution, resolution), np.uint8)
    for start in range(0, count, CHUNK_IMAGES):  # in pieces, as the sums take four times the memory
        piece = images[start : start + CHUNK_IMAGES]
        windows = piece.reshape(len(piece), channels, resolution, window, resolution, window)
        pooled[start : start + CHUNK_IMAGES] = np.rint(windows.sum(axis=(3, 5), dtype=np.uint32) / window**2)
    return pooled


def channel_statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images (N, C, H, W), in units of 255 (pixels run from 0 to 1)."""
    channels = images.shape[1]
    histogram = np.zeros((channels, 256), np.int64)  # exact, and no float copy of the images
    for start in range(0, len(images), CHUNK_IMAGES):
        for channel in range(channels):
            piece = images[start : start + CHUNK_IMAGES, channel]
            histogram[channel] += np.bincount(piece.ravel(), minlength=256)
    levels = np.arange(256) / 255
    share = histogram / histogram.sum(axis=1, keepdims=True)
    mean = share @ levels
    deviation = np.sqrt((share * (levels - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(deviation.tolist())


SPLIT_SEED = 20240229
"""The seed of every split of a data set: one validation set for everybody, whatever the seed of a run."""


def stratified_split(
    labels: NDArray[np.int64], sizes: tuple[int, ...], rng_seed: int = SPLIT_SEED
) -> tuple[NDArray[np.int64], ...]:
    """Disjoint index arrays of exactly `sizes` into `labels` (N,), with classes in proportion.

    In each part every class has its proportional count rounded down or up. Each part is in random order, so that its
    beginning is a fair sample of it.
    """
    if labels.ndim != 1:
        raise BadValueError(f"labels must have shape (N,); given {labels.shape}")
    if any(size < 0 for size in sizes):
        raise BadValueError(f"sizes must not be negative; given {sizes}")
    if sum(sizes) > len(labels):
        asked = " + ".join(map(str, sizes))
        raise DataError(f"asked for {asked} = {sum(sizes)} samples out of {len(labels)}; ask for fewer")
    if not len(labels):
        return tuple(np.empty(0, np.int64) for _ in sizes)

    draws = np.random.PCG64(rng_seed).random_raw(len(labels))
    order = np.argsort(draws, kind="stable")
    _, classes, class_counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    counts = _allot(class_counts.tolist(), (*sizes, len(labels) - sum(sizes)))  # the last part is what stays behind

    part_of = np.empty(len(labels), np.int64)  # of each place in `order`
    for index in range(len(class_counts)):
        dealt = [row[index] for row in counts]
        part_of[classes == index] = np.repeat(np.arange(len(counts)), dealt)
    return tuple(order[part_of == part].astype(np.int64) for part in range(len(sizes)))


def _allot(class_counts: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Counts (parts, classes) with the given row and column sums, each the proportional count rounded down or up.

    Every part starts with the counts rounded down; its missing samples go to the classes of largest remainder.
    Where parts compete for the same class, an augmenting path moves an earlier choice. That always succeeds, since
    the proportional counts are themselves a fractional solution and such a flow problem then has a whole one.
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
            assert claimed, "a whole solution exists"
    for index, parts in enumerate(holders):
        for part in parts:
            counts[part][index] += 1
    return counts
