"""Values out of JSON that others wrote, checked where they are taken; a wrong one is named with its place."""

import json
import math
from pathlib import Path
from typing import Any, TypeGuard

from esper.leyline import BadValueError
from esper.leyline.records import refuse_constant

Json = Any  # parsed JSON


class Fields:
    """One JSON object and where it stands: a file, or a file and its line."""

    def __init__(self, content: Json, where: str) -> None:
        if not isinstance(content, dict):
            raise BadValueError(f"{where} is no JSON object, but {_short(content)}")
        self.content: dict[str, Json] = content
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.content.get(key)
        if not is_number(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def whole(self, key: str) -> int:
        """An integer of 0 or more."""
        value = self.content.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, "an integer of 0 or more")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self.content.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None where there is none."""
        return None if self.content.get(key) is None else self.text(key)

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        value = self.content.get(key)
        if not isinstance(value, list) or not all(is_number(item) for item in value):
            raise self._wrong(key, "a list of finite numbers")
        return [float(item) for item in value]

    def optional_numbers(self, key: str) -> list[float] | None:
        """A list of finite numbers, or None where there is none."""
        return None if self.content.get(key) is None else self.numbers(key)

    def counts(self, key: str) -> dict[str, int]:
        """Names and how often; empty where there is none."""
        value = self.content.get(key, {})
        if not isinstance(value, dict) or not all(is_number(item) and item >= 0 for item in value.values()):
            raise self._wrong(key, "an object of counts")
        return {name: int(count) for name, count in value.items()}

    def objects(self, key: str) -> list["Fields"]:
        """A list of objects; empty where there is none."""
        value = self.content.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list of objects")
        return [Fields(item, f"{self.where}, {key}[{index}]") for index, item in enumerate(value)]

    def inside(self, key: str) -> "Fields":
        """The object under a key."""
        return Fields(self.content.get(key), f"{self.where}, {key}")

    def _wrong(self, key: str, wanted: str) -> BadValueError:
        if key not in self.content:
            return BadValueError(f"{self.where} has no {key!r}; it should be {wanted}")
        return BadValueError(f"{self.where}: {key!r} is {_short(self.content[key])}, not {wanted}")


def is_number(value: Json) -> TypeGuard[float]:
    """Finite, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_object(path: Path, what: str) -> Fields:
    """A file that holds one JSON object; `what` it should have been stands in the message."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or no UTF-8
        raise BadValueError(f"{path} is no {what}: {error}") from error
    return Fields(content, str(path))


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
