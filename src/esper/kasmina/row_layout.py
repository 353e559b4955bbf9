"""Rows side by side: how the images of R networks lie in memory, and how rows are taken, added to and joined.

Images of R rows are logically `(R, B, C, H, W)` and stored as `(B, R·C, H, W)`, channels last on CUDA, so that a
grouped convolution and the norms see them without a copy. Only the functions here, and CUDA kernels, know this.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

# Axes (rows, batch, channels, height, width) in the order of memory: on CUDA a grouped convolution then sees
# channels-last images, on the CPU contiguous ones.
STORED = {"cuda": (1, 3, 4, 0, 2), "cpu": (1, 0, 2, 3, 4)}
BACK = {"cuda": (3, 0, 4, 1, 2), "cpu": (1, 0, 2, 3, 4)}
_ROW_AXIS = {"cuda": 3, "cpu": 1}


def fold_rows(x: Tensor) -> Tensor:
    """(R, B, C, H, W) → (B, R·C, H, W); a view where the rows are stored that way, a copy elsewhere."""
    folded = x.transpose(0, 1).flatten(1, 2)
    return folded.contiguous(memory_format=torch.channels_last) if x.device.type == "cuda" else folded


def unfold_rows(x: Tensor, rows: int) -> Tensor:
    """(B, R·C, H, W) → (R, B, C, H, W), always a view."""
    batch, channels, height, width = x.shape
    return x.view(batch, rows, channels // rows, height, width).transpose(0, 1)


def has_kernels(x: Tensor) -> bool:
    """Whether these are rows of images for which there are kernels of ours: on CUDA, in no more than float32."""
    return x.dim() == 5 and x.device.type == "cuda" and x.dtype != torch.float64


def _as_stored(x: Tensor) -> tuple[Tensor, int]:
    """The same numbers in the order of memory, and the axis of rows there."""
    if x.dim() != 5:
        return x, 0
    return x.permute(STORED[x.device.type]), _ROW_AXIS[x.device.type]


def _back(x: Tensor) -> Tensor:
    """From the order of memory to (R, B, …)."""
    return x.permute(BACK[x.device.type]) if x.dim() == 5 else x


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of these numbers, in the layout that rows are stored in."""
    stored, axis = _as_stored(x)
    recorded = x.requires_grad and torch.is_grad_enabled()
    if stored.dim() == 5 and stored.is_contiguous() and x.device.type == "cuda" and not recorded:
        from esper.kasmina.kernels.rows import take_stored  # needs triton, which only CUDA builds bring along

        return _back(take_stored(stored, rows))
    return _back(stored.index_select(axis, rows))


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows behind rows."""
    stored, axes = zip(*(_as_stored(part) for part in parts), strict=True)
    return _back(torch.cat(stored, axes[0]))


def split_rows(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The first rows and the rest, each stored for itself."""
    stored, axis = _as_stored(x)
    before, behind = stored.split([first, stored.shape[axis] - first], axis)
    return _back(before.contiguous()), _back(behind.contiguous())


def copy_rows(x: Tensor) -> Tensor:
    """A copy in the layout that rows are stored in, whatever that of `x` is."""
    return _back(_as_stored(x)[0].clone(memory_format=torch.contiguous_format))


def add_into_rows(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add to the rows of these numbers, in place; a number may occur several times."""
    stored, axis = _as_stored(x)
    stored.index_add_(axis, rows, _as_stored(values)[0])


def _with_added(x: Tensor, rows: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """A copy of `x`, one for all, with all values added to their rows."""
    result = copy_rows(x)
    for numbers, value in zip(rows, values, strict=True):
        add_into_rows(result, numbers, value)
    return result


Over = Callable[[Sequence[Tensor]], AbstractContextManager[Iterator[Tensor]]]


@contextmanager
def in_turn(items: Sequence[Tensor]) -> Iterator[Iterator[Tensor]]:
    """One after the other."""
    yield iter(items)


class _Share(torch.autograd.Function):
    """`x` itself and several groups of its rows. Backwards all of them meet in one copy of the gradient; one by one,
    every group would cost a gradient of the whole size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Over, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*rows)
        with over(rows) as walk:
            return x.view_as(x), *(take_rows(x, numbers) for numbers in walk)

    @staticmethod
    def backward(ctx: Any, whole: Tensor, *taken: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.saved_tensors
        return _with_added(whole, rows, taken), None, *(None for _ in rows)


class _Add(torch.autograd.Function):
    """`x` with values added to several groups of its rows, in one copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, *rest: Tensor) -> Tensor:
        rows, values = rest[:groups], rest[groups:]
        ctx.save_for_backward(*rows)
        return _with_added(x, rows, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.saved_tensors
        return gradient, None, *(None for _ in rows), *(take_rows(gradient, numbers) for numbers in rows)


def share_rows(x: Tensor, rows: Sequence[Tensor], over: Over = in_turn) -> tuple[Tensor, list[Tensor]]:
    """`x`, and the rows of each group of numbers, gathered `over` these in turn or side by side.

    What is made of the rows is to be added to the `x` returned.
    """
    shared, *taken = _Share.apply(x, over, *rows)  # type: ignore[no-untyped-call]  # torch does not say
    return shared, taken


def add_rows(x: Tensor, rows: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """`x` with `values` added to the rows of each group of numbers; a number may occur several times."""
    result: Tensor = _Add.apply(x, len(rows), *rows, *values)  # type: ignore[no-untyped-call]  # torch does not say
    return result
