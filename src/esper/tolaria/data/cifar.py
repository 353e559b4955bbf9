"""CIFAR-10's python archive, read without trusting it.

The archive holds pickles, and unpickling runs what a pickle names. Here a pickle can name only the globals that a NumPy
array is made of. Even those stand for inert records, so nothing out of the file is ever called: the arrays are built
afterwards from the recorded shapes and bytes.
"""

import io
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
GLOBALS = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
)


# Values out of a pickle can be anything, hence Any in the signatures below.
class _Record:
    """Stands for a global of a pickle: records the arguments of a call and the state that is set, and runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return _Record(*arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Encode(_Record):
    """Stands for _codecs.encode, by which Python 3 writes bytes in protocol 2."""

    def __call__(self, text: Any, encoding: Any) -> bytes:
        return bytes(text, "latin1")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Record:
        if f"{module}.{name}" not in GLOBALS:
            raise pickle.UnpicklingError(f"it names the global {module}.{name}")
        return _Encode() if name == "encode" else _Record()


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _build_array(record: _Record) -> NDArray[np.uint8]:
    """The array of bytes that a record describes; raises for everything else."""
    _version, shape, dtype, fortran, content = record.state
    if _text(dtype.arguments[0]) != "u1":
        raise ValueError(f"an array of type {_text(dtype.arguments[0])!r} instead of u1")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


def unpickle_plain(content: bytes, where: object) -> dict[str, Any]:
    """A pickled dict of byte arrays and plain values, its keys as text; raises DataError naming `where` otherwise."""
    try:
        loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        return {_text(key): _build_array(x) if isinstance(x, _Record) else x for key, x in loaded.items()}
    except Exception as error:  # damaged bytes can make a pickle fail in any way at all
        raise DataError(f"{where}: not a pickle of byte arrays and plain values: {error!r}") from error


def _read_batch(content: bytes, where: str, rows: int) -> LabelledImages:
    """One batch: images (rows, 3, 32, 32) and labels (rows,)."""
    batch = unpickle_plain(content, where)
    data, labels = (np.asarray(batch.get(name)) for name in ("data", "labels"))
    if data.dtype != np.uint8 or data.shape != (rows, PIXELS):
        raise DataError(f"{where}: expected data of uint8 ({rows}, {PIXELS}); got {data.dtype} {data.shape}")
    if labels.dtype != np.int64 or labels.shape != (rows,):
        raise DataError(f"{where}: expected {rows} whole numbers as labels; got {labels.dtype} {labels.shape}")
    return LabelledImages(data.reshape(rows, 3, 32, 32), labels)


def read_cifar10(archive: Path, *, rows: int = 10_000) -> ImageArrays:
    """CIFAR-10 from its python archive, whose batches have `rows` images each."""
    paths = {name: f"{FOLDER}/{name}" for name in (*TRAIN_BATCHES, TEST_BATCH, META)}
    files = dict(archive_files(archive, set(paths.values()).__contains__, max_bytes=MAX_BATCH_BYTES))
    if missing := [path for path in paths.values() if path not in files]:
        raise DataError(f"{archive}: missing {', '.join(missing)}")
    names = unpickle_plain(files.pop(paths[META]), f"{archive}: {paths[META]}").get("label_names")
    if not isinstance(names, list) or len(names) != 10:
        raise DataError(f"{archive}: {paths[META]}: expected ten label_names; got {names!r}")
    *train, test = (_read_batch(files[paths[b]], f"{archive}: {paths[b]}", rows) for b in (*TRAIN_BATCHES, TEST_BATCH))
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return check_image_arrays(ImageArrays(LabelledImages(images, labels), test, tuple(map(_text, names))), archive)
