"""JSON that others wrote: `Fields` checks values where they are taken, and names a wrong one with its place."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

from esper.leyline import BadValueError
from esper.leyline.records import Json, refuse_constant
from esper.storage.logs import read_lines

_LARGEST = sys.float_info.max
COUNTS = range(2**63)
"""What a count may be: pictures and databases take no larger numbers"""


class Fields(dict[str, Json]):
    """A JSON object, and where it comes from: a file, or a file and its line."""

    def __init__(self, content: Json, where: str) -> None:
        if not isinstance(content, dict):
            raise BadValueError(f"{where} is no JSON object, but {_short(content)}")
        super().__init__(content)
        self.where = where

    def _take(self, key: str, is_right: Callable[[Json], bool], wanted: str) -> Json:
        if is_right(self.get(key)):
            return self[key]
        if key not in self:
            raise BadValueError(f"{self.where} has no {key!r}; it should be {wanted}")
        raise BadValueError(f"{self.where}: {key!r} is {_short(self[key])}, not {wanted}")

    def number(self, key: str) -> float:
        """A finite number."""
        return float(self._take(key, is_number, "a finite number"))

    def whole(self, key: str) -> int:
        """An integer of 0 or more."""
        return int(self._take(key, _is_count, "an integer of 0 or more"))

    def text(self, key: str) -> str:
        """A string."""
        return str(self._take(key, lambda value: isinstance(value, str), "a string"))

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        return [float(value) for value in self._items(key, is_number, "finite numbers")]

    def wholes(self, key: str) -> list[int]:
        """A list of integers of 0 or more."""
        return self._items(key, _is_count, "integers of 0 or more")

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        return self._items(key, lambda value: isinstance(value, str), "strings")

    def optional_texts(self, key: str) -> list[str | None]:
        """A list of strings and null."""
        return self._items(key, lambda value: value is None or isinstance(value, str), "strings or null")

    def _items(self, key: str, is_right: Callable[[Json], bool], wanted: str) -> list[Json]:
        return list(
            self._take(key, lambda value: isinstance(value, list) and all(map(is_right, value)), f"a list of {wanted}")
        )

    def optional_text(self, key: str) -> str | None:
        """A string, or None if there is none."""
        return None if self.get(key) is None else self.text(key)

    def counts(self, key: str) -> dict[str, int]:
        """Counts by name; empty if the key is missing."""
        values = self.get(key, {})
        if not isinstance(values, dict) or not all(is_number(count) and count >= 0 for count in values.values()):
            raise BadValueError(f"{self.where}: {key!r} is {_short(values)}, not an object of counts")
        return {name: int(count) for name, count in values.items()}

    def objects(self, key: str) -> list["Fields"]:
        """A list of objects; empty if the key is missing."""
        values = self._take(key, lambda value: isinstance(value, list), "a list of objects") if key in self else []
        return [Fields(value, f"{self.where}, {key}[{index}]") for index, value in enumerate(values)]

    def inside(self, key: str) -> "Fields":
        """The object under a key."""
        return Fields(self.get(key), f"{self.where}, {key}")


def is_number(value: Json) -> TypeGuard[float]:
    """Whether a value is a finite number, and no bool."""
    # Compared, because an integer may be too large for a float. By type, which is fast: JSON has no other numbers.
    return type(value) in (float, int) and -_LARGEST <= value <= _LARGEST


def _is_count(value: Json) -> bool:
    return type(value) is int and value in COUNTS


def read_object(path: Path, what: str) -> Fields:
    """Read a file with one JSON object. `what` names the kind of file in errors."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or no UTF-8
        raise BadValueError(f"{path} is no {what}: {error}") from error
    return Fields(content, str(path))


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def checked_lines(path: Path) -> Iterator[Fields]:
    """Yield the objects of a file with their line numbers. A torn last line is skipped."""
    number = 0
    try:
        for number, content in enumerate(read_lines(path), 1):
            yield Fields(content, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValueError(f"{path} cannot be read behind line {number}: {error}") from error
