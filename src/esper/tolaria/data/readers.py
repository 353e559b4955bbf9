"""Readers of small formats: IDX files, text, and the digits of scikit-learn."""

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import BadValueError, DataError
from esper.tolaria.data.arrays import ImageArrays, LabelledImages, check_image_arrays, stratified_split
from esper.tolaria.data.directory import RemoteFile, locate

UINT8_CODE = 0x08
MAX_BYTES = 1 << 30  # a damaged header must not ask for all the memory; MNIST's largest file has 47 MB

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
FASHION_MNIST_FILES = (
    _remote("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", _FASHION_MIRRORS),
    _remote("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe", _FASHION_MIRRORS),
    _remote("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79", _FASHION_MIRRORS),
    _remote("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310", _FASHION_MIRRORS),
)

MNIST_CLASSES = tuple("0123456789")
FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """The values of an idx file of bytes, packed with gzip or not, with exactly that many dimensions; read-only."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not packed:
                return _parse(raw, path, dimensions)
            with gzip.GzipFile(fileobj=raw) as unpacked:
                return _parse(cast(IO[bytes], unpacked), path, dimensions)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged: {error}") from error


def _parse(file: IO[bytes], path: Path, dimensions: int) -> NDArray[np.uint8]:
    magic = file.read(4)
    expected = bytes((0, 0, UINT8_CODE, dimensions))
    if magic != expected:
        raise DataError(
            f"{path}: expected an idx file of bytes with {dimensions} dimension(s), "
            f"magic {expected.hex()}; found {magic.hex() or 'nothing'}"
        )
    header = file.read(4 * dimensions)
    if len(header) != 4 * dimensions:
        raise DataError(f"{path}: expected {4 * dimensions} bytes of dimensions; found {len(header)}")
    shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
    size = math.prod(shape)
    if size > MAX_BYTES:
        raise DataError(f"{path}: expected at most {MAX_BYTES} values; the header announces {shape}")
    values = file.read(size)
    if len(values) != size:
        raise DataError(f"{path}: expected {size} values for {shape}; found {len(values)}")
    if file.read(1):  # reading on to the end also has gzip check its CRC
        raise DataError(f"{path}: expected {size} values for {shape}; found more")
    return np.frombuffer(values, np.uint8).reshape(shape)


def read_labelled(images: Path, labels: Path) -> LabelledImages:
    """Images (N, 1, H, W) from an idx file of three dimensions, with their labels from one of one."""
    pixels = read_idx(images, dimensions=3)[:, np.newaxis]
    targets = read_idx(labels, dimensions=1).astype(np.int64)
    if len(pixels) != len(targets):
        raise DataError(f"{images} holds {len(pixels)} images but {labels} holds {len(targets)} labels")
    return LabelledImages(pixels, targets)


def read_idx_set(folder: Path, files: tuple[RemoteFile, ...], classes: tuple[str, ...]) -> ImageArrays:
    """A set of the MNIST family from its four files in `folder`, which are fetched when missing."""
    train_images, train_labels, test_images, test_labels = (locate(file, folder) for file in files)
    train = read_labelled(train_images, train_labels)
    test = read_labelled(test_images, test_labels)
    return check_image_arrays(ImageArrays(train, test, classes), folder)


TINYSHAKESPEARE_FILE = RemoteFile(
    "input.txt",
    1_115_394,
    "sha256",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)
HELD_OUT_CHARACTERS = 100_000
"""Length of the validation text and of the test text, unless told otherwise."""


class CharacterText(NamedTuple):
    """Character ids (N,) and the sorted characters that they index."""

    ids: NDArray[np.uint8]
    vocabulary: tuple[str, ...]


class TextParts(NamedTuple):
    """Ids (N,) of three stretches of one text, in this order."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    test: NDArray[np.uint8]


def read_text(path: Path) -> CharacterText:
    """A UTF-8 text of at most 256 distinct characters."""
    try:
        text = path.read_bytes().decode("utf-8")  # bytes, since a text file would have its line ends translated
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if not text:
        raise DataError(f"{path}: expected text; the file is empty")
    code_points, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), "<u4"), return_inverse=True)
    if len(code_points) > 256:
        raise DataError(f"{path}: expected at most 256 distinct characters; found {len(code_points)}")
    return CharacterText(ids.astype(np.uint8), tuple(chr(point) for point in code_points))


def split_text(
    ids: NDArray[np.uint8],
    *,
    validation_size: int = HELD_OUT_CHARACTERS,
    test_size: int = HELD_OUT_CHARACTERS,
) -> TextParts:
    """Cut a text into contiguous parts: the beginning for training, then validation, and the end for the test.

    Not drawn at random: neighbouring characters tell a lot about each other, so mixed parts would leak.
    """
    if validation_size < 0 or test_size < 0:
        raise BadValueError(f"sizes must not be negative; given {validation_size} and {test_size}")
    train_size = len(ids) - validation_size - test_size
    if train_size < 1:
        raise DataError(
            f"a text of {len(ids)} characters leaves nothing to train on after {validation_size} for validation "
            f"and {test_size} for the test; ask for fewer"
        )
    train, validation, test = np.split(ids, [train_size, train_size + validation_size])
    return TextParts(train, validation, test)


HIGHEST_VALUE = 16
TEST_SIZE = 397


def read_digits() -> ImageArrays:
    """The digits as images (N, 1, 8, 8) with values 0..16 stretched to 0..255; 1,400 for training, 397 for the test.

    The package publishes one set; its test part is drawn here, by the seeded rule of `stratified_split`.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    values = np.asarray(bunch.images, np.float64)[:, np.newaxis]  # (N, 1, 8, 8)
    labels = np.asarray(bunch.target, np.int64)
    everything = LabelledImages(np.rint(values * 255 / HIGHEST_VALUE).astype(np.uint8), labels)
    train, test = stratified_split(labels, (len(labels) - TEST_SIZE, TEST_SIZE))
    classes = tuple(str(name) for name in bunch.target_names)
    return check_image_arrays(ImageArrays(everything.take(train), everything.take(test), classes), "digits")
