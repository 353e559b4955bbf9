"""CIFAR-10's python archive, read without trusting it.

The archive holds pickles, and unpickling runs what a pickle names. Here a pickle can name only the few globals that a
NumPy array is made of, and even those stand for inert records of this module, so no code of NumPy's is called with
values out of the file: an array is built afterwards from its recorded shape, type and bytes.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import DataError
from esper.tolaria.data.arrays import ImageArrays, LabelledImages, check_image_arrays
from esper.tolaria.data.directory import RemoteFile, archive_files

CIFAR10_FILE = RemoteFile(
    "cifar-10-python.tar.gz",
    170_498_071,
    "md5",
    "c58f30108f718f92721af3b95e74349a",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
)
FOLDER = "cifar-10-batches-py"
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
META = "batches.meta"
PIXELS = 3 * 32 * 32
MAX_BATCH_BYTES = 64 << 20  # a batch has 31 MB

# Numbers only: an object type would bring other pickled values in with it.
_TYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"})


class _RefusedError(Exception):
    """A pickle that asks for more than arrays and plain values."""


# Values out of a pickle can be anything, hence Any in the signatures below.
class _Type:
    """Stands for numpy.dtype: records the name and the byte order."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = _text(name).lstrip("<>=|")
        self.order = "="
        if self.name not in _TYPES:
            raise _RefusedError(f"an array of type {self.name!r}, which is not a plain number")

    def __setstate__(self, state: Any) -> None:
        _version, order, subarray, names, fields, *_rest = state
        self.order = _text(order)
        if self.order not in ("<", ">", "=", "|") or (subarray, names, fields) != (None, None, None):
            raise _RefusedError("an array of structured type")


class _Array:
    """Stands for numpy.ndarray: records shape, type, order and bytes."""

    state: tuple[Any, ...] | None = None

    def __setstate__(self, state: Any) -> None:
        self.state = tuple(state)

    def build(self) -> NDArray[Any]:
        if self.state is None:
            raise _RefusedError("an array without content")
        _version, shape, kind, fortran, content = self.state
        if not isinstance(kind, _Type) or not isinstance(content, bytes):
            raise _RefusedError("an array whose content is not bytes of one type")
        dtype = np.dtype(kind.order.replace("|", "=") + kind.name)
        sizes = tuple(int(size) for size in shape)
        if min(sizes, default=0) < 0 or math.prod(sizes) * dtype.itemsize != len(content):
            raise _RefusedError(f"an array of {sizes} {dtype} with {len(content)} bytes")
        return np.frombuffer(content, dtype).reshape(sizes, order="F" if fortran else "C")


class _Callable:
    """What a pickle gets for a global; made anew for each pickle, and not changed by it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        raise _RefusedError(f"a change of {self.name}")

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "numpy.dtype":
            return _Type(*arguments)
        if self.name == "_codecs.encode":  # how protocol 2 writes bytes in Python 3
            text, encoding = arguments
            if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
                raise _RefusedError(f"_codecs.encode to {encoding!r} instead of latin1")
            return text.encode("latin1")
        if self.name.endswith("._reconstruct"):
            return _Array()
        raise _RefusedError(f"a call of {self.name}")


_GLOBALS = frozenset(
    {
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",
    }
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in _GLOBALS:
            raise _RefusedError(f"the global {full_name}")
        return _Callable(full_name)


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def unpickle_plain(content: bytes, where: object) -> dict[str, Any]:
    """A pickled dict of arrays and plain values, its keys as text; DataError naming `where` for anything else."""
    try:
        loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise _RefusedError(f"a {type(loaded).__name__} instead of a dict")
        return {_text(key): value.build() if isinstance(value, _Array) else value for key, value in loaded.items()}
    except _RefusedError as error:
        raise DataError(
            f"{where}: the pickle holds {error}; only arrays of numbers and plain values are read"
        ) from None
    except Exception as error:  # damaged bytes can make a pickle fail in any way at all
        raise DataError(f"{where}: not a readable pickle: {type(error).__name__}: {error}") from error


def _read_batch(content: bytes, where: str, rows: int) -> LabelledImages:
    """One batch: images (rows, 3, 32, 32) and labels (rows,)."""
    batch = unpickle_plain(content, where)
    data, labels = batch.get("data"), batch.get("labels")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (rows, PIXELS):
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise DataError(f"{where}: expected data of uint8 ({rows}, {PIXELS}); found {found}")
    if not isinstance(labels, list) or len(labels) != rows or not all(type(label) is int for label in labels):
        found = f"{len(labels)} values" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{where}: expected a list of {rows} whole numbers as labels; found {found}")
    if not all(0 <= label < 10 for label in labels):
        raise DataError(f"{where}: expected labels in 0..9; found {min(labels)}..{max(labels)}")
    return LabelledImages(data.reshape(rows, 3, 32, 32), np.array(labels, np.int64))


def read_cifar10(archive: Path, *, rows: int = 10_000) -> ImageArrays:
    """CIFAR-10 from its python archive, whose batches have `rows` images each."""
    wanted = {f"{FOLDER}/{name}": name for name in (*TRAIN_BATCHES, TEST_BATCH, META)}
    batches: dict[str, LabelledImages] = {}
    names: list[Any] | None = None
    for path, content in archive_files(archive, wanted.__contains__, max_bytes=MAX_BATCH_BYTES):
        where = f"{archive}: {path}"
        if wanted[path] == META:
            names = unpickle_plain(content, where).get("label_names")
            if not isinstance(names, list) or len(names) != 10:
                raise DataError(f"{where}: expected ten label_names; found {names!r}")
        else:
            batches[wanted[path]] = _read_batch(content, where, rows)
    missing = [path for path, name in wanted.items() if name not in batches and (name != META or names is None)]
    if missing or names is None:
        raise DataError(f"{archive}: missing {', '.join(missing)}")
    train = LabelledImages(
        np.concatenate([batches[name].images for name in TRAIN_BATCHES]),
        np.concatenate([batches[name].labels for name in TRAIN_BATCHES]),
    )
    classes = tuple(_text(name) for name in names)
    return check_image_arrays(ImageArrays(train, batches[TEST_BATCH], classes), archive)
