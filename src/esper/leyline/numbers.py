"""Numbers from outside: checks of their range, and seeds derived from names."""

import hashlib
import math
from typing import TypeGuard

from esper.leyline.errors import BadValueError


def require_whole(name: str, value: object, least: int | None = None, *, remark: str = "") -> None:
    """Raise unless `value` is an int, of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and isinstance(value, int) and value < least):
        wanted = "an integer" if least is None else f"an integer of {least} or more"
        raise BadValueError(f"{name} {value!r} is not {wanted}{remark}")


def require_share(name: str, value: object, *, remark: str = "") -> None:
    """Raise unless `value` is a number in (0, 1]."""
    if not _is_number(value) or not 0.0 < value <= 1.0:
        raise BadValueError(f"{name} {value!r} is not in (0, 1]{remark}")


def require_positive(name: str, value: object, *, remark: str = "") -> None:
    """Raise unless `value` is a finite number above 0."""
    if not _is_number(value) or not 0.0 < value < math.inf:
        raise BadValueError(f"{name} {value!r} is not a finite number above 0{remark}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order, the same on every machine and in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
