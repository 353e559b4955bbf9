"""Memory layout of rows: how images of R networks are stored, and how rows are gathered, added and concatenated.

Images of R rows are logically `(R, B, C, H, W)`. They are stored as `(B, R·C, H, W)`, channels last on CUDA, so that a
grouped convolution and the norms need no copy. On the CPU small ones are stored as `(R, C, H, W, B)`, for `products`.
Only the functions here, `products` and the CUDA kernels depend on this.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Axes (rows, batch, channels, height, width) in memory order. A grouped convolution then sees channels-last images on
# CUDA and contiguous ones on the CPU.
STORED = {"cuda": (1, 3, 4, 0, 2), "cpu": (1, 0, 2, 3, 4), "small": (0, 2, 3, 4, 1)}
BACK = {"cuda": (3, 0, 4, 1, 2), "cpu": (1, 0, 2, 3, 4), "small": (0, 4, 1, 2, 3)}
_ROW_AXIS = {"cuda": 3, "cpu": 1, "small": 0}
SMALL = 64  # pixels up to which products are faster than grouped convolutions
LONE = 512  # channels × pixels up to which a single network takes products; torch's own functions are faster beyond


def layout_of(x: Tensor) -> str:
    """The name of the layout of images (…, H, W)."""
    return "small" if x.device.type == "cpu" and x.shape[-2] * x.shape[-1] <= SMALL else x.device.type


def is_small(x: Tensor) -> bool:
    """Whether these are rows of images for `products`."""
    return x.dim() == 5 and layout_of(x) == "small"


def is_lone_small(x: Tensor) -> bool:
    """Whether these are images of a single network for which `products` serve too, so that it rounds like a fleet.

    Not where somebody records or transforms what is called: they know torch's own functions better.
    """
    return x.dim() == 4 and not _observed() and layout_of(x) == "small" and x[0].numel() <= LONE


def _observed() -> bool:
    """Whether torch is compiling or tracing, casts by itself, or transforms (`torch.func`)."""
    return (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None  # there are no public questions for these two
    )


def store_small(x: Tensor) -> Tensor:
    """(R, B, C, H, W) → (R, C, H, W, B), contiguous; a view if the rows are stored that way."""
    return x.permute(STORED["small"]).contiguous()


class _FromSmall(torch.autograd.Function):
    """A view. Gradients come back contiguous: sums over another order of memory would round differently, and then the
    bits of a host would depend on what grows in its neighbours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.permute(BACK["small"])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return store_small(gradient)


def from_small(x: Tensor) -> Tensor:
    """(R, C, H, W, B) → (R, B, C, H, W), a view."""
    view: Tensor = _FromSmall.apply(x)  # type: ignore[no-untyped-call]  # torch does not type it
    return view


def fold_rows(x: Tensor) -> Tensor:
    """(R, B, C, H, W) → (B, R·C, H, W); a view if the rows are stored that way, else a copy."""
    folded = x.transpose(0, 1).flatten(1, 2)
    return folded.contiguous(memory_format=torch.channels_last) if x.device.type == "cuda" else folded


def unfold_rows(x: Tensor, rows: int) -> Tensor:
    """(B, R·C, H, W) → (R, B, C, H, W), always a view."""
    batch, channels, height, width = x.shape
    return x.view(batch, rows, channels // rows, height, width).transpose(0, 1)


def has_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels serve these: rows of images on CUDA, not in float64."""
    return x.dim() == 5 and x.device.type == "cuda" and x.dtype != torch.float64


def _as_stored(x: Tensor) -> tuple[Tensor, int]:
    """`x` with axes in memory order, and the axis of its rows."""
    if x.dim() != 5:
        return x, 0
    layout = layout_of(x)
    return x.permute(STORED[layout]), _ROW_AXIS[layout]


def _back(stored: Tensor, like: Tensor) -> Tensor:
    """From memory order to the axes of `like` (R, B, …), which has the same layout."""
    return stored.permute(BACK[layout_of(like)]) if like.dim() == 5 else stored


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather the rows with these indices, in the stored layout."""
    stored, axis = _as_stored(x)
    recorded = x.requires_grad and torch.is_grad_enabled()
    if stored.dim() == 5 and stored.is_contiguous() and x.device.type == "cuda" and not recorded:
        from esper.kasmina.kernels.rows import take_stored  # only CUDA builds include triton

        return _back(take_stored(stored, rows), x)
    return _back(stored.index_select(axis, rows), x)


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows."""
    stored, axes = zip(*(_as_stored(part) for part in parts), strict=True)
    return _back(torch.cat(stored, axes[0]), parts[0])


def split_rows(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The first rows and the rest, each contiguous in the stored layout."""
    stored, axis = _as_stored(x)
    before, behind = stored.split([first, stored.shape[axis] - first], axis)
    return _back(before.contiguous(), x), _back(behind.contiguous(), x)


def copy_rows(x: Tensor) -> Tensor:
    """A copy in the stored layout."""
    return _back(_as_stored(x)[0].clone(memory_format=torch.contiguous_format), x)


def add_into_rows(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add to the rows with these indices, in place; an index may repeat."""
    stored, axis = _as_stored(x)
    stored.index_add_(axis, rows, _as_stored(values)[0])


def _with_added(x: Tensor, rows: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """One copy of `x` with all values added to their rows."""
    result = copy_rows(x)
    for indices, value in zip(rows, values, strict=True):
        add_into_rows(result, indices, value)
    return result


Over = Callable[[Sequence[Tensor]], AbstractContextManager[Iterable[Tensor]]]
"""Walks over groups of rows, one after the other or on parallel streams."""


class _Share(torch.autograd.Function):
    """`x` itself and several groups of its rows.

    The backward pass adds all groups into one copy of the gradient; separate gathers would need one copy per group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Over, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*rows)
        with over(rows) as walk:
            return x.view_as(x), *(take_rows(x, indices) for indices in walk)

    @staticmethod
    def backward(ctx: Any, whole: Tensor, *groups: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.saved_tensors
        return _with_added(whole, rows, groups), None, *(None for _ in rows)


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
        return gradient, None, *(None for _ in rows), *(take_rows(gradient, indices) for indices in rows)


def share_rows(x: Tensor, rows: Sequence[Tensor], over: Over = nullcontext) -> tuple[Tensor, list[Tensor]]:
    """`x`, and the rows of each group of indices. Add what is computed from the rows to the returned `x`."""
    shared, *groups = _Share.apply(x, over, *rows)  # type: ignore[no-untyped-call]  # torch does not type it
    return shared, groups


def add_rows(x: Tensor, rows: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """`x` with `values` added to the rows of each group of indices; an index may repeat."""
    result: Tensor = _Add.apply(x, len(rows), *rows, *values)  # type: ignore[no-untyped-call]  # torch does not type it
    return result
