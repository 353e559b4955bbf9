"""What the readers of images return, and the few operations on whole sets of pixels."""

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
