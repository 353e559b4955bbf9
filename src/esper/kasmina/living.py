"""Which rows of a pass are no padding, for kernels that leave the others out."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_LIVING: ContextVar[Tensor | None] = ContextVar("living", default=None)


@contextmanager
def living_rows(rows: Tensor) -> Iterator[None]:
    """Within this block kernels may leave out rows that are padding: those where `rows` (R,) is False. What they hold
    then is anything, and reaches no other row."""
    before = _LIVING.set(rows)
    try:
        yield
    finally:
        _LIVING.reset(before)


def living(rows: int) -> Tensor | None:
    """Which of that many rows are no padding (R,); None if nobody said so: all count."""
    found = _LIVING.get()
    return None if found is None or len(found) != rows else found
