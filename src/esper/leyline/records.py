"""Frozen dataclasses as JSON and back. Reading is strict: fields and types must match the dataclass exactly."""

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from esper.leyline.errors import BadValueError
from esper.leyline.outcomes import Measurement

Json = Any  # parsed JSON, or what will become JSON
NOT_FINITE = ("nan", "inf", "-inf")  # how floats that JSON lacks are written


def refuse_constant(name: str) -> Json:
    """Raise for NaN and the infinities, which Python's parser accepts and JSON does not have."""
    raise ValueError(f"{name} is not a JSON value")


def checksum(content: Mapping[str, Json]) -> str:
    """Digest of the content, independent of formatting."""
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(plain.encode()).hexdigest()


def config_checksum(content: Mapping[str, Json]) -> str:
    """Digest of a run's `config.json` without its own checksum and the data folder, which may differ by machine."""
    config = {name: value for name, value in content["config"].items() if name != "data_dir"}
    return checksum({name: value for name, value in content.items() if name != "checksum"} | {"config": config})


def flatten(
    content: Mapping[str, Json], separator: str = "/", skip: Collection[str] = ()
) -> Iterator[tuple[str, Json]]:
    """Yield the values of nested objects by their paths, `outer/inner`. Keys in `skip` are omitted at every level."""
    for name, value in content.items():
        if name not in skip and isinstance(value, Mapping):
            yield from ((f"{name}{separator}{path}", leaf) for path, leaf in flatten(value, separator, skip))
        elif name not in skip:
            yield name, value


def printable(text: str) -> str:
    """Text with control characters escaped, so that no log can send commands to a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def encode(value: Json) -> Json:
    """Convert to plain JSON. Floats that JSON lacks become the words of `NOT_FINITE`."""
    if is_dataclass(value) and not isinstance(value, type):
        return encode(asdict(value))
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(hint: Any, value: Json, where: str) -> Any:  # Any: a type, and a value of it
    """Convert JSON to the type `hint`. Objects must have exactly the fields of their dataclass; a bool is no int."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        kinds = [kind for kind in inner if kind is not NoneType]  # of two, the second is a tuple
        return None if value is None else decode(kinds[-1] if isinstance(value, list) else kinds[0], value, where)
    if origin is tuple and isinstance(value, list) and (inner[-1] is Ellipsis or len(inner) == len(value)):
        hints = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        items = zip(hints, value, strict=True)
        return tuple(decode(each, item, f"{where}[{index}]") for index, (each, item) in enumerate(items))
    if hint is Measurement and isinstance(value, list) and len(value) == 2:
        return Measurement(*(decode(float, item, where) for item in value))
    if is_dataclass(hint) and isinstance(value, dict):
        return _decode_object(hint, value, where)
    if isinstance(value, str) and isinstance(hint, type) and issubclass(hint, Enum) and value in hint.__members__:
        return hint[value]
    if hint is float and (type(value) in (int, float) or value in NOT_FINITE):
        return float(value)
    if (origin is Literal and value in inner) or type(value) is (origin or hint):
        return value
    allowed = list(hint.__members__) if isinstance(hint, type) and issubclass(hint, Enum) else inner or hint.__name__
    raise BadValueError(f"{where} is {value!r}; allowed: {allowed}")


def _decode_object(hint: Any, values: dict[str, Json], where: str) -> Any:  # Any: a dataclass, and one of it
    names, hints = {f.name for f in fields(hint)}, get_type_hints(hint)
    if set(values) != names:
        unknown, missing = sorted(set(values) - names), sorted(names - set(values))
        raise BadValueError(f"{where} has unknown keys {unknown} and lacks {missing}; allowed: {sorted(names)}")
    decoded = {name: decode(hints[name], values[name], f"{where}.{name}") for name in values}
    try:
        return hint(**decoded)
    except ValueError as error:
        raise BadValueError(f"{where}: {error}") from error
