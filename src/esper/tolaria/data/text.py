"""Text as a sequence of characters: tiny Shakespeare."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import BadValueError, DataError
from esper.tolaria.data.directory import RemoteFile

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
