"""idx files: what is read, and that damage is named."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.leyline.errors import DataError
from esper.tolaria.data.readers import FASHION_CLASSES, FASHION_FILES, read_idx, read_idx_set

IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)


def idx_bytes(array: NDArray[np.uint8], *, code: int = 8) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("packed", [True, False])
def test_reads_values(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(idx_bytes(IMAGES)) if packed else idx_bytes(IMAGES))
    np.testing.assert_array_equal(read_idx(path, dimensions=3), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "magic 00000803; found nothing"),
        (b"\0\0\x08", "found 000008"),
        (b"PK\3\4" + bytes(100), "found 504b0304"),
        (idx_bytes(IMAGES, code=0x0D), "found 00000d03"),
        (idx_bytes(IMAGES[0]), "found 00000802"),
        (idx_bytes(IMAGES)[:9], "found 00000803 in 9 bytes"),
        (idx_bytes(IMAGES)[:-1], r"expected 60 values for \(3, 4, 5\); found 59"),
        (idx_bytes(IMAGES) + b"!", "expected 60 values .* found 61"),
        (
            struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1),
            r"values for \(4294967295, 4294967295, 4294967295\); found 0",
        ),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_names_the_file_and_the_damage(tmp_path: Path, content: bytes, message: str, packed: bool) -> None:
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, dimensions=3)
    assert str(path) in str(caught.value)


def test_truncated_and_tampered_gzip(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    packed = gzip.compress(idx_bytes(np.arange(240, dtype=np.uint8).reshape(3, 8, 10)))
    for length in (3, 12, len(packed) // 2, len(packed) - 6, len(packed) - 1):
        path.write_bytes(packed[:length])
        with pytest.raises(DataError, match=r"images\.gz is truncated or damaged"):
            read_idx(path, dimensions=3)
    path.write_bytes(packed[:-8] + bytes(4) + packed[-4:])  # the CRC
    with pytest.raises(DataError, match="CRC"):
        read_idx(path, dimensions=3)


def test_any_flipped_byte_is_an_error_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    packed = gzip.compress(idx_bytes(IMAGES))
    for place in range(len(packed)):
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 0x41]) + packed[place + 1 :])
        try:
            np.testing.assert_array_equal(read_idx(path, dimensions=3), IMAGES)  # a byte of the header's time, say
        except DataError as error:
            assert str(path) in str(error)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent"):
        read_idx(tmp_path / "absent", dimensions=1)


def test_the_real_fashion_mnist(real_data: Path) -> None:
    folder = real_data / "fashion_mnist"
    if not folder.is_dir():
        pytest.skip(f"no fashion_mnist in {real_data}")
    arrays = read_idx_set(folder, FASHION_FILES, FASHION_CLASSES)
    assert arrays.train.images.shape == (60_000, 1, 28, 28)
    assert arrays.test.images.shape == (10_000, 1, 28, 28)
    assert np.bincount(arrays.train.labels).tolist() == [6_000] * 10
    assert np.bincount(arrays.test.labels).tolist() == [1_000] * 10
    assert FASHION_CLASSES[arrays.train.labels[0]] == "Ankle boot"
