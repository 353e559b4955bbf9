"""CIFAR-10's archive: arrays come out, and code does not run."""

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.leyline.errors import DataError
from esper.tolaria.data.cifar import FOLDER, META, TEST_BATCH, TRAIN_BATCHES, read_cifar10, unpickle_plain

ROWS = 4
CLASSES = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck"]


def pixels(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (ROWS, 3072), dtype=np.uint8)


def python2_batch(data: NDArray[np.uint8], labels: list[int]) -> bytes:
    """A batch as Python 2 and the NumPy of 2009 wrote it, opcode by opcode."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + b"K\x00K\x01tR"
    dtype += b"(K\x03" + string(b"|") + b"NNN" + integer(-1) + integer(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + string(b"b") + b"tR"
    content = b"T" + struct.pack("<I", data.nbytes) + data.tobytes()
    array += b"(K\x01(" + integer(data.shape[0]) + integer(data.shape[1]) + b"t" + dtype + b"\x89" + content + b"tb"
    numbers = b"](" + b"".join(integer(label) for label in labels) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def batches(dump: Callable[[NDArray[np.uint8], list[int]], bytes] = python2_batch) -> dict[str, bytes]:
    names = (*TRAIN_BATCHES, TEST_BATCH)
    files = {f"{FOLDER}/{name}": dump(pixels(seed), [seed, 1, 2, 9]) for seed, name in enumerate(names)}
    return files | {f"{FOLDER}/{META}": pickle.dumps({b"label_names": CLASSES, b"num_vis": 3072}, protocol=2)}


def write_archive(path: Path, files: dict[str, bytes], *extra: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return path


def test_reads_what_python_2_wrote(tmp_path: Path) -> None:
    arrays = read_cifar10(write_archive(tmp_path / "cifar.tar.gz", batches()), rows=ROWS)
    assert arrays.classes == tuple(name.decode() for name in CLASSES)
    expected = np.concatenate([pixels(seed) for seed in range(5)]).reshape(-1, 3, 32, 32)
    np.testing.assert_array_equal(arrays.train.images, expected)
    np.testing.assert_array_equal(arrays.test.images, pixels(5).reshape(-1, 3, 32, 32))
    assert arrays.train.labels.tolist() == [label for seed in range(5) for label in (seed, 1, 2, 9)]
    assert arrays.test.labels.tolist() == [5, 1, 2, 9]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_reads_what_python_3_writes(protocol: int, order: Any, module: bytes) -> None:
    values: dict[Any, Any] = {
        b"data": np.asarray(pixels(0), order=order),
        b"x": 3,
    }
    written = pickle.dumps(values, protocol=protocol)
    if protocol < 4:  # protocol 4 counts the bytes of names
        written = written.replace(b"numpy._core.multiarray", module).replace(b"numpy.core.multiarray", module)
    loaded = unpickle_plain(written, "here")
    np.testing.assert_array_equal(loaded["data"], pixels(0))
    assert loaded["x"] == 3


class Payload:
    """Pickles to a call that would leave a marker."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    for payload in (Payload(os.system, f"touch {marker}"), Payload(eval, f"open({str(marker)!r}, 'w')")):
        files = batches()
        files[f"{FOLDER}/{TEST_BATCH}"] = pickle.dumps({"data": pixels(0), "labels": payload}, protocol=protocol)
        archive = write_archive(tmp_path / "cifar.tar.gz", files)
        with pytest.raises(DataError, match=r"test_batch: .*the global \w+\.(system|eval)"):
            read_cifar10(archive, rows=ROWS)
        assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"data": np.array([None, "x"], object)}, protocol=2), "type 'O8'"),
        (pickle.dumps({"data": np.array(["x"])}, protocol=2), "type 'U1'"),
        (pickle.dumps({"data": np.zeros(2, [("a", "u1")])}, protocol=2), "type 'V1'"),
        (pickle.dumps({"data": np.zeros(2, np.uint8)}, protocol=5), r"the global numpy\._core\.numeric\._frombuffer"),
        (pickle.dumps({"data": np.array([1.5], ">f8")}, protocol=2), "type 'f8'"),
        (pickle.dumps({"data": np.dtype}, protocol=4), "not a pickle of byte arrays"),
        (pickle.dumps([1, 2]), "not a pickle of byte arrays"),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R.", "not a pickle of byte arrays"),
        (b"\x80\x02cnumpy\nndarray\nK\x01\x85R.", "not a pickle of byte arrays"),
        (
            b"\x80\x02cnumpy\ndtype\n}X\x04\x00\x00\x00nameX\x01\x00\x00\x00asb.",
            "not a pickle of byte arrays",
        ),
        (
            b"\x80\x02}X\x01\x00\x00\x00acnumpy.core.multiarray\n_reconstruct\n)Rs.",
            "not a pickle of byte arrays",
        ),
        (b"\x80\x02cos\nsystem\n.", r"the global os\.system"),
        (b"\x80\x02Pname\n.", "not a pickle of byte arrays"),
        (python2_batch(pixels(0), [1])[:-700], "not a pickle of byte arrays"),
        (
            python2_batch(pixels(0), [1]).replace(b"J\x00\x0c\x00\x00", b"J\x01\x0c\x00\x00"),
            "cannot reshape array of size 12288",
        ),
        (python2_batch(pixels(0), [1]).replace(b"U\x02u1", b"U\x02O8"), "type 'O8'"),
        (b"", "not a pickle of byte arrays"),
    ],
)
def test_nothing_but_arrays_and_plain_values(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"here: .*{message}"):
        unpickle_plain(content, "here")


def test_damaged_archives(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "cifar.tar.gz", batches())
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 3, len(whole) - 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="truncated or damaged"):
            read_cifar10(path, rows=ROWS)
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :])
    with pytest.raises(DataError):
        read_cifar10(path, rows=ROWS)
    path.unlink()
    with pytest.raises(DataError):
        read_cifar10(path, rows=ROWS)


@pytest.mark.parametrize("missing", ["data_batch_3", TEST_BATCH, META])
def test_missing_batch(tmp_path: Path, missing: str) -> None:
    files = batches()
    del files[f"{FOLDER}/{missing}"]
    with pytest.raises(DataError, match=f"missing {FOLDER}/{missing}"):
        read_cifar10(write_archive(tmp_path / "cifar.tar.gz", files), rows=ROWS)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"data": np.zeros((ROWS, 3071), np.uint8), "labels": [0] * ROWS},
            r"uint8 \(4, 3072\); got uint8 \(4, 3071\)",
        ),
        ({"data": np.zeros((ROWS + 1, 3072), np.uint8), "labels": [0] * ROWS}, r"got uint8 \(5, 3072\)"),
        ({"data": np.zeros((ROWS, 3072), np.float32), "labels": [0] * ROWS}, "type 'f4' instead of u1"),
        ({"data": [1, 2], "labels": [0] * ROWS}, r"got int64 \(2,\)"),
        ({"labels": [0] * ROWS}, "got object"),
        ({"data": pixels(0), "labels": [0]}, r"got int64 \(1,\)"),
        ({"data": pixels(0), "labels": ["0"] * ROWS}, "whole numbers"),
        ({"data": pixels(0)}, "got object"),
    ],
)
def test_wrong_shapes(tmp_path: Path, batch: dict[str, Any], message: str) -> None:
    files = batches()
    files[f"{FOLDER}/data_batch_2"] = pickle.dumps(batch, protocol=2)
    with pytest.raises(DataError, match=f"data_batch_2: .*{message}"):
        read_cifar10(write_archive(tmp_path / "cifar.tar.gz", files), rows=ROWS)


def test_labels_out_of_range(tmp_path: Path) -> None:
    files = batches()
    files[f"{FOLDER}/{TEST_BATCH}"] = python2_batch(pixels(0), [0, 0, 0, 10])
    with pytest.raises(DataError, match=r"test labels in 0\.\.9; got 0\.\.10"):
        read_cifar10(write_archive(tmp_path / "cifar.tar.gz", files), rows=ROWS)


@pytest.mark.parametrize("name", ["../outside", "/absolute", f"{FOLDER}/../../outside", "..\\outside"])
def test_names_that_lead_out(tmp_path: Path, name: str) -> None:
    archive = write_archive(tmp_path / "cifar.tar.gz", batches() | {name: b"x"})
    with pytest.raises(DataError, match="leads out of the archive"):
        read_cifar10(archive, rows=ROWS)
    assert os.listdir(tmp_path) == ["cifar.tar.gz"]


def test_links_and_duplicates(tmp_path: Path) -> None:
    files = batches()
    del files[f"{FOLDER}/{TEST_BATCH}"]
    link = tarfile.TarInfo(f"{FOLDER}/{TEST_BATCH}")
    link.type, link.linkname = tarfile.SYMTYPE, "data_batch_1"
    with pytest.raises(DataError, match="test_batch is a link"):
        read_cifar10(write_archive(tmp_path / "cifar.tar.gz", files, link), rows=ROWS)
    again = batches() | {f"./{FOLDER}/{TEST_BATCH}": b""}
    with pytest.raises(DataError, match="test_batch twice"):
        read_cifar10(write_archive(tmp_path / "cifar.tar.gz", again), rows=ROWS)
