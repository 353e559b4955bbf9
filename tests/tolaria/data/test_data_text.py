"""Character text: ids, vocabulary and contiguous parts."""

from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import BadValueError, DataError
from esper.tolaria.data import TextData, load
from esper.tolaria.data.readers import read_text


def test_ids_index_the_sorted_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_bytes("häb\r\nab".encode())
    ids, vocabulary = read_text(path)
    assert vocabulary == ("\n", "\r", "a", "b", "h", "ä")
    assert ids.tolist() == [4, 5, 3, 1, 0, 2, 3]
    assert ids.dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\xff\xfe", "UTF-8"),
        ("".join(map(chr, range(300, 557))).encode(), "at most 256 distinct characters; found 257"),
    ],
)
def test_refusals(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "input.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_text(path)
    assert str(path) in str(caught.value)


def test_the_real_tiny_shakespeare(real_data: Path) -> None:
    path = real_data / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        pytest.skip(f"no tinyshakespeare in {real_data}")
    data = load("tinyshakespeare", data_dir=real_data)
    assert isinstance(data, TextData)
    assert len(data.vocabulary) == 65
    assert [len(part) for part in (data.train, data.validation, data.test)] == [915_394, 100_000, 100_000]
    ids = [*data.train.tolist(), *data.validation.tolist(), *data.test.tolist()]
    assert "".join(data.vocabulary[index] for index in ids) == path.read_text(encoding="ascii")

    smaller = load("tinyshakespeare", data_dir=real_data, validation_size=500, train_size=10)
    assert isinstance(smaller, TextData)
    assert smaller.train.tolist() == ids[:10]
    assert smaller.validation.tolist() == ids[-100_500:-100_000]
    assert smaller.test.tolist() == ids[-100_000:]
    for sizes in ({"train_size": 10**7}, {"validation_size": 10**7}):
        with pytest.raises(DataError, match="ask for fewer"):
            load("tinyshakespeare", data_dir=real_data, **sizes)
    with pytest.raises(BadValueError, match="no resolution"):
        load("tinyshakespeare", data_dir=real_data, resolution=14)
