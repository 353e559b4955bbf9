"""Checks of values, random seeds derived from names, and Student's t."""

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import TypeGuard

from esper.leyline.errors import BadValueError, EsperError, UnknownNameError

CLAIM_SEEDS = 5  # training seeds below which a difference between policies is a report and no claim


def refuse(problems: Mapping[str, bool], error: type[EsperError] = BadValueError) -> None:
    """Raise the first of these problems that applies."""
    for problem, applies in problems.items():
        if applies:
            raise error(problem)


def require_whole(name: str, value: object, least: int | None = None, *, remark: str = "") -> None:
    """Raise unless `value` is an int, of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
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


def require_known(kind: str, name: object, known: Collection[object]) -> None:
    """Raise unless `name` is one of those that are known."""
    if name not in known:
        raise UnknownNameError(kind, name, known)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit random seed from all parts in their order, equal on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def t_quantile(freedom: float) -> float:
    """The 97.5 % point of Student's t, by bisection of the two-sided p-value."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, 1.0, freedom) > 0.05 else (low, middle)
    return high


def p_value(mean: float, error: float, freedom: float) -> float:
    """The two-sided p-value of a mean under Student's t, by numerical integration of its density."""
    import numpy as np  # here, because the command line starts without it

    if error == 0:
        return 0.0 if mean else 1.0
    t = abs(mean) / error
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    # Substituting x = √ν·tan(u) makes the tail a finite stretch.
    angles = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 4001)
    density = np.cos(angles) ** (freedom - 1)
    return float(min(1.0, 2 * scale * math.sqrt(freedom) * np.trapezoid(density, angles)))
