"""CUDA kernels for BatchNorm, ReLU and 2×2 max pooling of rows of channels-last images, forward and backward.

Images are a matrix (pixels, columns), with the channels of all rows as columns. Separate kernels read and write an
activation eleven times. Here the forward pass reads it twice and writes a quarter; the backward pass recomputes, reads
twice and writes once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.kasmina.kernels.launching import kernel
from esper.kasmina.row_hints import living

ALL = tl.constexpr(tl.PropagateNan.ALL)  # a NaN stays one, so that losses show it
COLUMNS = 128
POOLED = 8  # pooled pixels of a tile
PER = 256  # pooled pixels per program of a sum: they are first summed over these, then over programs
PARTS = 32  # programs whose sums are read at once


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _living(living, column, columns, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Which columns exist and belong to rows that are no padding; with CHANNELS 0 there is no padding."""
    inside = column < columns
    if CHANNELS > 0:
        inside = inside & (tl.load(living + column // CHANNELS, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _limit(count, inside):  # type: ignore[no-untyped-def]
    """The count; 0 where no column is to be computed."""
    return tl.where(tl.max(inside.to(tl.int32), 0) > 0, count, 0)


@kernel
def _sums_kernel(  # type: ignore[no-untyped-def]
    x, sums, squares, living, pixels,
    columns, CHANNELS: tl.constexpr, PER: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Per program: Σx and Σx² of PER pixels, for a block of columns."""
    part, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = _living(living, column, columns, CHANNELS)
    total = tl.zeros((PIXELS, BLOCK), tl.float32)
    square = tl.zeros((PIXELS, BLOCK), tl.float32)
    for step in range(0, _limit(PER, inside), PIXELS):
        pixel = part * PER + step + tl.arange(0, PIXELS)
        seen = (pixel < pixels)[:, None] & inside[None, :]
        index = pixel.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + index, mask=seen, other=0.0).to(tl.float32)
        total += value
        square += value * value
    tl.store(sums + part * columns + column, tl.sum(total, 0), mask=inside)
    tl.store(squares + part * columns + column, tl.sum(square, 0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _over_parts(sums, parts, column, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The sums (parts, columns) of a block of columns over all parts."""
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        seen = (part < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(sums + part[:, None] * columns + column[None, :], mask=seen, other=0.0)
    return tl.sum(total, 0)


@kernel
def _moments_kernel(  # type: ignore[no-untyped-def]
    sums, squares, weight, bias, found, parts, pixels, columns, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Lines of `found` (5, columns): mean, unbiased variance, 1/√(variance + ε), and slope and offset of the norm."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    mean = _over_parts(sums, parts, column, columns, PARTS, BLOCK) / pixels
    square = _over_parts(squares, parts, column, columns, PARTS, BLOCK) / pixels
    variance = tl.maximum(square - mean * mean, 0.0, ALL)
    scale = 1.0 / tl.sqrt(variance + eps)
    slope = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * scale
    offset = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) - mean * slope
    unbiased = variance * (pixels / tl.maximum(pixels - 1, 1))
    tl.store(found + column, mean, mask=inside)
    tl.store(found + columns + column, unbiased, mask=inside)
    tl.store(found + 2 * columns + column, scale, mask=inside)
    tl.store(found + 3 * columns + column, slope, mask=inside)
    tl.store(found + 4 * columns + column, offset, mask=inside)


@triton.jit
def _window(pooled, height, width):  # type: ignore[no-untyped-def]
    """Number of the upper left pixel of each pooled pixel's window."""
    half = width // 2
    image, rest = pooled // (half * (height // 2)), pooled % (half * (height // 2))
    return ((image * height + 2 * (rest // half)) * width + 2 * (rest % half)).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(first, pixels, height, width, column, inside, columns, POOLED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Of a tile of pooled pixels: where its windows and its pooled values lie, what exists, and what is computed."""
    pooled = first + tl.arange(0, POOLED)
    exists = (pooled < pixels)[:, None] & (column < columns)[None, :]
    start = _window(pooled, height, width)[:, None] * columns + column[None, :]
    return start, pooled.to(tl.int64)[:, None] * columns + column[None, :], exists, exists & inside[None, :]


@triton.jit
def _windows(x, start, width, columns, seen):  # type: ignore[no-untyped-def]
    """The four inputs of each window."""
    below = start + width * columns
    x0 = tl.load(x + start, mask=seen, other=0.0).to(tl.float32)
    x1 = tl.load(x + start + columns, mask=seen, other=0.0).to(tl.float32)
    x2 = tl.load(x + below, mask=seen, other=0.0).to(tl.float32)
    x3 = tl.load(x + below + columns, mask=seen, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, slope, offset, y, living, pixels, height, width,
    columns, CHANNELS: tl.constexpr, POOLED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """y = relu(max over 2×2 of slope·x + offset), a tile of pooled pixels per program; 0 in padding, as cuDNN mixes
    neighbouring rows with weights of zero, and needs numbers that stay finite."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = _living(living, column, columns, CHANNELS)
    start, target, exists, seen = _tile(
        tl.program_id(0) * POOLED, pixels, height, width, column, inside, columns, POOLED
    )
    a = tl.load(slope + column, mask=inside, other=0.0)[None, :]
    b = tl.load(offset + column, mask=inside, other=0.0)[None, :]
    x0, x1, x2, x3 = _windows(x, start, width, columns, seen)
    best = tl.maximum(a * x0 + b, a * x1 + b, ALL)
    best = tl.maximum(best, tl.maximum(a * x2 + b, a * x3 + b, ALL), ALL)
    tl.store(y + target, tl.where(seen, tl.maximum(best, 0.0, ALL), 0.0), mask=exists)


@triton.jit
def _winner(x0, x1, x2, x3, a, b):  # type: ignore[no-untyped-def]
    """Which input of each window wins (the first of equals), −1 where the ReLU is shut."""
    best = a * x0 + b
    y1, y2, y3 = a * x1 + b, a * x2 + b, a * x3 + b
    which = tl.where(y1 > best, 1, 0)
    best = tl.maximum(best, y1, ALL)
    which = tl.where(y2 > best, 2, which)
    best = tl.maximum(best, y2, ALL)
    which = tl.where(y3 > best, 3, which)
    best = tl.maximum(best, y3, ALL)
    return tl.where(best <= 0.0, -1, which)


@kernel
def _reduce_kernel(  # type: ignore[no-untyped-def]
    x, g, slope, offset, sums, products, living, pixels, height, width,
    columns, CHANNELS: tl.constexpr, PER: tl.constexpr, POOLED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Per program: Σ g and Σ g·x over PER pooled pixels, where g reaches the input at all."""
    part, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = _living(living, column, columns, CHANNELS)
    a = tl.load(slope + column, mask=inside, other=0.0)[None, :]
    b = tl.load(offset + column, mask=inside, other=0.0)[None, :]
    total = tl.zeros((POOLED, BLOCK), tl.float32)
    product = tl.zeros((POOLED, BLOCK), tl.float32)
    for step in range(0, _limit(PER, inside), POOLED):
        start, source, exists, seen = _tile(  # noqa: RUF059
            part * PER + step, pixels, height, width, column, inside, columns, POOLED
        )
        x0, x1, x2, x3 = _windows(x, start, width, columns, seen)
        which = _winner(x0, x1, x2, x3, a, b)
        value = tl.load(g + source, mask=seen, other=0.0).to(tl.float32)
        value = tl.where(which >= 0, value, 0.0)
        won = tl.where(which == 0, x0, tl.where(which == 1, x1, tl.where(which == 2, x2, x3)))
        total += value
        product += value * won
    tl.store(sums + part * columns + column, tl.sum(total, 0), mask=inside)
    tl.store(products + part * columns + column, tl.sum(product, 0), mask=inside)


@kernel
def _slopes_kernel(  # type: ignore[no-untyped-def]
    sums, products, found, gradients, parts, pixels, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Lines of `gradients` (4, columns): those of weight and bias, Σ g·x̂ and Σ g with x̂ = (x − mean)·scale; then shift
    and tilt, where the gradient of x is slope·g − shift − tilt·x: slope·(g − Σg/n − x̂·Σ(g·x̂)/n)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    mean = tl.load(found + column, mask=inside, other=0.0)
    scale = tl.load(found + 2 * columns + column, mask=inside, other=0.0)
    slope = tl.load(found + 3 * columns + column, mask=inside, other=0.0)
    total = _over_parts(sums, parts, column, columns, PARTS, BLOCK)
    weighted = (_over_parts(products, parts, column, columns, PARTS, BLOCK) - mean * total) * scale
    tilt = slope * weighted * scale / pixels
    tl.store(gradients + column, weighted, mask=inside)
    tl.store(gradients + columns + column, total, mask=inside)
    tl.store(gradients + 2 * columns + column, slope * total / pixels - tilt * mean, mask=inside)
    tl.store(gradients + 3 * columns + column, tilt, mask=inside)


@kernel
def _backward_kernel(  # type: ignore[no-untyped-def]
    x, g, slope, offset, shift, tilt, dx, living, pixels, height, width,
    columns, CHANNELS: tl.constexpr, POOLED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """dx = slope·g at the winner, minus (shift + tilt·x) everywhere, in a tile of pooled pixels; 0 in padding."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = _living(living, column, columns, CHANNELS)
    start, source, exists, seen = _tile(
        tl.program_id(0) * POOLED, pixels, height, width, column, inside, columns, POOLED
    )
    a = tl.load(slope + column, mask=inside, other=0.0)[None, :]
    b = tl.load(offset + column, mask=inside, other=0.0)[None, :]
    s = tl.load(shift + column, mask=inside, other=0.0)[None, :]
    t = tl.load(tilt + column, mask=inside, other=0.0)[None, :]
    x0, x1, x2, x3 = _windows(x, start, width, columns, seen)
    which = _winner(x0, x1, x2, x3, a, b)
    value = a * tl.load(g + source, mask=seen, other=0.0).to(tl.float32)
    below = start + width * columns
    # Where nothing is computed, all of these are 0.
    tl.store(dx + start, tl.where(which == 0, value, 0.0) - s - t * x0, mask=exists)
    tl.store(dx + start + columns, tl.where(which == 1, value, 0.0) - s - t * x1, mask=exists)
    tl.store(dx + below, tl.where(which == 2, value, 0.0) - s - t * x2, mask=exists)
    tl.store(dx + below + columns, tl.where(which == 3, value, 0.0) - s - t * x3, mask=exists)


def _pooled(x: Tensor, slope: Tensor, offset: Tensor, living: Tensor, channels: int) -> Tensor:
    """relu(max over 2×2 of slope·x + offset); with `channels` per row, padding is left out."""
    batch, columns, height, width = x.shape
    y = torch.empty(
        batch, columns, height // 2, width // 2, device=x.device, dtype=x.dtype, memory_format=torch.channels_last
    )
    pixels = batch * height * width // 4
    grid = (triton.cdiv(pixels, POOLED), triton.cdiv(columns, COLUMNS))
    _forward_kernel[grid](x, slope, offset, y, living, pixels, height, width, columns, channels, POOLED, COLUMNS)
    return y


class _NormReluPool(torch.autograd.Function):
    """relu(batch_norm(x)), pooled: (B, K, H, W) channels-last → (B, K, H/2, W/2), and the batch's mean and variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, columns, height, width = x.shape
        ctx.living = living(rows)
        ctx.channels = 0 if ctx.living is None else columns // rows
        some = x if ctx.living is None else ctx.living
        pixels = batch * height * width
        parts, blocks = triton.cdiv(pixels, 4 * PER), triton.cdiv(columns, COLUMNS)
        sums, squares = torch.empty(2, parts, columns, device=x.device, dtype=torch.float32)
        _sums_kernel[parts, blocks](x, sums, squares, some, pixels, columns, ctx.channels, 4 * PER, 2 * POOLED, COLUMNS)
        found = torch.empty(5, columns, device=x.device, dtype=torch.float32)
        few = triton.cdiv(columns, PARTS)
        _moments_kernel[(few,)](sums, squares, weight, bias, found, parts, pixels, columns, eps, PARTS, PARTS)
        mean, unbiased, _, slope, offset = found
        y = _pooled(x, slope, offset, some, ctx.channels)
        ctx.save_for_backward(x, found)
        ctx.mark_non_differentiable(mean, unbiased)
        ctx.set_materialize_grads(False)  # no zeros for these two
        return y, mean, unbiased

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, found = ctx.saved_tensors
        some = x if ctx.living is None else ctx.living
        slope, offset = found[3:]
        batch, columns, height, width = x.shape
        pixels = batch * height * width
        g = g.contiguous(memory_format=torch.channels_last)
        parts, blocks = triton.cdiv(pixels // 4, PER), triton.cdiv(columns, COLUMNS)
        sums, products = torch.empty(2, parts, columns, device=x.device, dtype=torch.float32)
        sizes = (pixels // 4, height, width, columns, ctx.channels)
        _reduce_kernel[parts, blocks](x, g, slope, offset, sums, products, some, *sizes, PER, POOLED, COLUMNS)
        gradients = torch.empty(4, columns, device=x.device, dtype=torch.float32)
        few = triton.cdiv(columns, PARTS)
        _slopes_kernel[(few,)](sums, products, found, gradients, parts, pixels, columns, PARTS, PARTS)
        weighted, total, shift, tilt = gradients
        dx = torch.empty_like(x)
        tiles = triton.cdiv(pixels // 4, POOLED)
        _backward_kernel[tiles, blocks](x, g, slope, offset, shift, tilt, dx, some, *sizes, POOLED, COLUMNS)
        return dx, weighted, total, None, None


def norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """relu(batch_norm(x)) pooled by 2×2, with the batch's mean and unbiased variance; x (B, K, H, W), H and W even.
    The K channels are those of `rows` networks."""
    x = x.contiguous(memory_format=torch.channels_last)
    return _NormReluPool.apply(x, weight, bias, eps, rows)  # type: ignore[no-any-return, no-untyped-call]


def scale_relu_pool(x: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """relu(slope·x + offset) pooled by 2×2, without gradients; x (B, K, H, W), H and W even, slope and offset (K,)."""
    return _pooled(x.contiguous(memory_format=torch.channels_last), slope, offset, x, 0)
