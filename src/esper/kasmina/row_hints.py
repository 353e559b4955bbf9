"""What kernels may know of the rows of a pass: which are padding, and which see the same inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_LIVING: ContextVar[Tensor | None] = ContextVar("living", default=None)
_INPUTS: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("inputs", default=None)


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


@contextmanager
def shared_inputs(inputs: Tensor, tiles: Tensor | None) -> Iterator[None]:
    """Within this block a layer that reads `inputs` (R, B, …) may read them once for several rows. `tiles` (T, members)
    has the numbers of rows that see the same, −1 where a tile has fewer."""
    before = _INPUTS.set(None if tiles is None else (inputs, tiles))
    try:
        yield
    finally:
        _INPUTS.reset(before)


def tiles_of(x: Tensor) -> Tensor | None:
    """The tiles of x, if it is the inputs of a pass."""
    found = _INPUTS.get()
    return found[1] if found is not None and found[0] is x else None
