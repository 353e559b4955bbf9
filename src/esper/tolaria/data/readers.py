"""Readers of small formats: IDX files, text, and the digits of scikit-learn."""

import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import DataError
from esper.tolaria.data.arrays import ImageArrays, LabelledImages, check_image_arrays, stratified_split
from esper.tolaria.data.directory import RemoteFile, locate, open_unpacked

DIGITS_TEST_SIZE = 397
UINT8_CODE = 0x08

_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION_MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)


def _remote(name: str, size: int, md5: str, mirrors: tuple[str, ...]) -> RemoteFile:
    return RemoteFile(name, size, "md5", md5, tuple(mirror + name for mirror in mirrors))


# In the order: training images, training labels, test images, test labels.
MNIST_FILES = (
    _remote("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873", _MNIST_MIRRORS),
    _remote("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432", _MNIST_MIRRORS),
    _remote("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3", _MNIST_MIRRORS),
    _remote("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c", _MNIST_MIRRORS),
)
FASHION_FILES = (
    _remote("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", _FASHION_MIRRORS),
    _remote("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe", _FASHION_MIRRORS),
    _remote("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79", _FASHION_MIRRORS),
    _remote("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310", _FASHION_MIRRORS),
)

MNIST_CLASSES = tuple("0123456789")
FASHION_CLASSES = (
    *["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag"],
    "Ankle boot",
)


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """The values of an idx file of bytes with exactly that number of dimensions, gzipped or not; read-only."""
    start = 4 + 4 * dimensions
    try:
        with open_unpacked(path) as file:
            content = file.read()  # to the end, where gzip checks its CRC
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged: {error}") from error
    expected, magic = bytes((0, 0, UINT8_CODE, dimensions)), content[:4]
    if magic != expected or len(content) < start:
        wanted = f"expected an idx file of bytes with {dimensions} dimension(s), magic {expected.hex()}"
        raise DataError(f"{path}: {wanted}; found {magic.hex() or 'nothing'} in {len(content)} bytes")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    if math.prod(shape) != len(content) - start:
        raise DataError(f"{path}: expected {math.prod(shape)} values for {shape}; found {len(content) - start}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_idx_set(folder: Path, files: tuple[RemoteFile, ...], classes: tuple[str, ...]) -> ImageArrays:
    """A set of the MNIST family from its four files in `folder`. Fetches them if they are missing."""
    paths = [locate(file, folder) for file in files]
    train, test = (
        LabelledImages(read_idx(images, dimensions=3)[:, np.newaxis], read_idx(labels, dimensions=1).astype(np.int64))
        for images, labels in (paths[:2], paths[2:])
    )
    return check_image_arrays(ImageArrays(train, test, classes), folder)


TINYSHAKESPEARE_FILE = RemoteFile(
    "input.txt",
    1_115_394,
    "sha256",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)


def read_text(path: Path) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Character ids (N,) of a UTF-8 text of at most 256 distinct characters, and the sorted characters."""
    try:
        text = path.read_bytes().decode("utf-8")  # bytes, since a text file would have its line ends translated
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if not text:
        raise DataError(f"{path}: expected text; the file is empty")
    code_points, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), "<u4"), return_inverse=True)
    if len(code_points) > 256:
        raise DataError(f"{path}: expected at most 256 distinct characters; found {len(code_points)}")
    return ids.astype(np.uint8), tuple(map(chr, code_points))


def read_digits() -> ImageArrays:
    """The digits of scikit-learn, one set split here: (N, 1, 8, 8), values 0..16 scaled to 0..255."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    values = np.asarray(bunch.images, np.float64)[:, np.newaxis]  # (N, 1, 8, 8)
    labels = np.asarray(bunch.target, np.int64)
    images = np.rint(values * 255 / 16).astype(np.uint8)
    parts = stratified_split(labels, (len(labels) - DIGITS_TEST_SIZE, DIGITS_TEST_SIZE))
    train, test = (LabelledImages(images[part], labels[part]) for part in parts)
    return ImageArrays(train, test, tuple(map(str, bunch.target_names)))
