"""CUDA kernels for rows of channels-last images: a matrix (pixels, columns), with the channels of all rows as columns.

- `norm_relu_pool`: BatchNorm, ReLU and 2×2 max pooling. Separate kernels read and write an activation eleven times.
  Here the forward pass reads it twice and writes a quarter; the backward pass recomputes, reads twice and writes once.
- `resize_channels`: pads or cuts the channels per row, at the speed of a copy. Can mark rows that are not finite.
- `mix_channels`: the 1×1 convolution of every row, for which cuDNN would launch a kernel per row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ALL = tl.constexpr(tl.PropagateNan.ALL)  # a NaN stays one, so that losses show it
COLUMNS = 128
PIXELS = 32  # pooled ones per program: statistics are first summed over these, then over programs


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _sums_kernel(x, sums, squares, pixels, columns: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Per program: Σx and Σx² of PER pixels, for a block of columns."""
    part, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for step in range(PER):
        pixel = part * PER + step
        value = tl.load(x + pixel.to(tl.int64) * columns + column, mask=inside & (pixel < pixels), other=0.0).to(
            tl.float32
        )
        total += value
        square += value * value
    tl.store(sums + part * columns + column, total, mask=inside)
    tl.store(squares + part * columns + column, square, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(x, slope, offset, y, height, width, columns: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """y = relu(max over 2×2 of slope·x + offset), one pooled pixel per program."""
    pooled, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    a = tl.load(slope + column, mask=inside)
    b = tl.load(offset + column, mask=inside)
    start = _window(pooled, height, width) * columns
    best = a * tl.load(x + start + column, mask=inside).to(tl.float32) + b
    best = tl.maximum(best, a * tl.load(x + start + columns + column, mask=inside).to(tl.float32) + b, ALL)
    start += width * columns
    best = tl.maximum(best, a * tl.load(x + start + column, mask=inside).to(tl.float32) + b, ALL)
    best = tl.maximum(best, a * tl.load(x + start + columns + column, mask=inside).to(tl.float32) + b, ALL)
    tl.store(y + pooled.to(tl.int64) * columns + column, tl.maximum(best, 0.0, ALL), mask=inside)


@triton.jit
def _window(pooled, height, width):  # type: ignore[no-untyped-def]
    """Number of the upper left pixel of a pooled pixel's window."""
    half = width // 2
    image, rest = pooled // (half * (height // 2)), pooled % (half * (height // 2))
    return ((image * height + 2 * (rest // half)) * width + 2 * (rest % half)).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _winner(x, start, width, columns: tl.constexpr, column, inside, a, b):  # type: ignore[no-untyped-def]
    """The four inputs of a window, and which of them wins (the first of equals), −1 where the ReLU is shut."""
    x0 = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(x + start + columns + column, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + start + width * columns + column, mask=inside, other=0.0).to(tl.float32)
    x3 = tl.load(x + start + width * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
    best, which = a * x0 + b, tl.zeros_like(column)
    y1, y2, y3 = a * x1 + b, a * x2 + b, a * x3 + b
    which = tl.where(y1 > best, 1, which)
    best = tl.maximum(best, y1, ALL)
    which = tl.where(y2 > best, 2, which)
    best = tl.maximum(best, y2, ALL)
    which = tl.where(y3 > best, 3, which)
    best = tl.maximum(best, y3, ALL)
    return x0, x1, x2, x3, tl.where(best <= 0.0, -1, which)


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_kernel(  # type: ignore[no-untyped-def]
    x, g, slope, offset, sums, products, pixels, height, width,
    columns: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Per program: Σ g and Σ g·x over PER pooled pixels, where g reaches the input at all."""
    part, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    a = tl.load(slope + column, mask=inside, other=0.0)
    b = tl.load(offset + column, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for step in range(PER):
        pooled = part * PER + step
        live = inside & (pooled < pixels)
        start = _window(pooled, height, width) * columns
        x0, x1, x2, x3, which = _winner(x, start, width, columns, column, live, a, b)
        value = tl.load(g + pooled.to(tl.int64) * columns + column, mask=live, other=0.0).to(tl.float32)
        value = tl.where(which >= 0, value, 0.0)
        won = tl.where(which == 0, x0, tl.where(which == 1, x1, tl.where(which == 2, x2, x3)))
        total += value
        product += value * won
    tl.store(sums + part * columns + column, total, mask=inside)
    tl.store(products + part * columns + column, product, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    x, g, slope, offset, shift, tilt, dx, height, width, columns: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """dx = slope·g at the winner, minus (shift + tilt·x) everywhere; one pooled pixel per program."""
    pooled, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    a = tl.load(slope + column, mask=inside)
    b = tl.load(offset + column, mask=inside)
    s = tl.load(shift + column, mask=inside)
    t = tl.load(tilt + column, mask=inside)
    start = _window(pooled, height, width) * columns
    x0, x1, x2, x3, which = _winner(x, start, width, columns, column, inside, a, b)
    value = a * tl.load(g + pooled.to(tl.int64) * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + start + column, tl.where(which == 0, value, 0.0) - s - t * x0, mask=inside)
    tl.store(dx + start + columns + column, tl.where(which == 1, value, 0.0) - s - t * x1, mask=inside)
    below = start + width * columns
    tl.store(dx + below + column, tl.where(which == 2, value, 0.0) - s - t * x2, mask=inside)
    tl.store(dx + below + columns + column, tl.where(which == 3, value, 0.0) - s - t * x3, mask=inside)


class _NormReluPool(torch.autograd.Function):
    """relu(batch_norm(x)), pooled: (B, K, H, W) channels-last → (B, K, H/2, W/2), and the batch's mean and variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        batch, columns, height, width = x.shape
        pixels = batch * height * width
        parts = triton.cdiv(pixels, 4 * PIXELS)
        blocks = triton.cdiv(columns, COLUMNS)
        sums, squares = torch.empty(2, parts, columns, device=x.device, dtype=torch.float32)
        _sums_kernel[parts, blocks](x, sums, squares, pixels, columns, 4 * PIXELS, COLUMNS)
        mean = sums.sum(0) / pixels
        variance = (squares.sum(0) / pixels - mean.square()).clamp_min(0)
        scale = torch.rsqrt(variance + eps)
        slope = weight * scale
        offset = bias - mean * slope
        y = torch.empty(
            batch, columns, height // 2, width // 2, device=x.device, dtype=x.dtype, memory_format=torch.channels_last
        )
        _forward_kernel[pixels // 4, blocks](x, slope, offset, y, height, width, columns, COLUMNS)
        ctx.save_for_backward(x, slope, offset, mean, scale)
        unbiased = variance * (pixels / max(pixels - 1, 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return y, mean, unbiased

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, slope, offset, mean, scale = ctx.saved_tensors
        batch, columns, height, width = x.shape
        pixels = batch * height * width
        g = g.contiguous(memory_format=torch.channels_last)
        parts, blocks = triton.cdiv(pixels // 4, PIXELS), triton.cdiv(columns, COLUMNS)
        sums, products = torch.empty(2, parts, columns, device=x.device, dtype=torch.float32)
        _reduce_kernel[parts, blocks](
            x, g, slope, offset, sums, products, pixels // 4, height, width, columns, PIXELS, COLUMNS
        )
        total = sums.sum(0)
        # Σ g·x̂ with x̂ = (x − mean)·scale
        weighted = (products.sum(0) - mean * total) * scale
        # dx = slope·(g − Σg/n − x̂·Σ(g·x̂)/n)
        tilt = slope * weighted * scale / pixels
        shift = slope * total / pixels - tilt * mean
        dx = torch.empty_like(x)
        _backward_kernel[pixels // 4, blocks](x, g, slope, offset, shift, tilt, dx, height, width, columns, COLUMNS)
        return dx, weighted, total, None


def norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """relu(batch_norm(x)) pooled by 2×2, with the batch's mean and unbiased variance; x (B, K, H, W), H and W even."""
    x = x.contiguous(memory_format=torch.channels_last)
    return _NormReluPool.apply(x, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit  # type: ignore[untyped-decorator]
def _resize_kernel(  # type: ignore[no-untyped-def]
    x, y, marks, elements, rows: tl.constexpr, before: tl.constexpr, after: tl.constexpr, marked: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """y (…, rows, after) is x (…, rows, before), cut or filled up with zeros; if `marked`, finite, with marks (rows,).
    Of equal width y is x: in the usual case it is read and nothing is written."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if before == after:
        value = tl.load(x + index, mask=index < elements, other=0.0)
    else:
        seen = (index < elements) & (index % after < before)
        value = tl.load(x + (index // after) * before + index % after, mask=seen, other=0.0)
    if marked:
        broken = (tl.abs(value.to(tl.float32)) < float("inf")) == 0
        value = tl.where(broken, 0.0, value)
        if tl.max(broken.to(tl.int32), 0) > 0:  # few blocks need the divisions
            tl.store(marks + index // after % rows, tl.full((BLOCK,), float("nan"), tl.float32), mask=broken)
            if before == after:
                tl.store(y + index, value, mask=broken)
    if before != after:
        tl.store(y + index, value, mask=index < elements)


class _ResizeChannels(torch.autograd.Function):
    """(…, R, before) → (…, R, channels), contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int, marks: Tensor | None) -> Tensor:
        *space, rows, ctx.before = x.shape
        x = x.contiguous()
        y = x.view_as(x) if ctx.before == channels else x.new_empty(*space, rows, channels)
        if marks is not None or ctx.before != channels:
            _resize_kernel[(triton.cdiv(y.numel(), 1024),)](
                x, y, x if marks is None else marks, y.numel(), rows, ctx.before, channels, marks is not None, 1024
            )
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _ResizeChannels.apply(g, ctx.before, None), None, None  # type: ignore[no-untyped-call]


def resize_channels(x: Tensor, channels: int, marks: Tensor | None = None) -> Tensor:
    """The last axis of x (…, R, C) cut, or filled up with zeros.

    With `marks` (R,) of zeros the result is finite: what is not becomes 0, and the mark of its row NaN. Without a new
    width x itself changes, which costs no more than reading it.
    """
    return _ResizeChannels.apply(x, channels, marks)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit  # type: ignore[untyped-decorator]
def _mix_kernel(  # type: ignore[no-untyped-def]
    x, weight, y, pixels, rows, inputs: tl.constexpr, outputs: tl.constexpr, stride_out, stride_in,
    PIXELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """y[p, r, o] = Σ_i x[p, r, i]·weight[r, o, i] for a block of pixels of one row."""
    row = tl.program_id(1)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    base = (pixel.to(tl.int64) * rows + row)[:, None]
    values = tl.load(x + base * inputs + i[None, :], mask=(pixel < pixels)[:, None] & (i < inputs)[None, :], other=0.0)
    kernel = tl.load(
        weight + row * inputs * outputs + o[None, :] * stride_out + i[:, None] * stride_in,
        mask=(i < inputs)[:, None] & (o < outputs)[None, :],
        other=0.0,
    )
    mixed = tl.dot(values, kernel, input_precision="ieee")
    tl.store(y + base * outputs + o[None, :], mixed, mask=(pixel < pixels)[:, None] & (o < outputs)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _mix_weight_kernel(  # type: ignore[no-untyped-def]
    x, g, partial, pixels, rows, steps, inputs: tl.constexpr, outputs: tl.constexpr,
    PIXELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Per program: Σ_p g[p, r, o]·x[p, r, i] over some pixels of one row."""
    part, row = tl.program_id(0), tl.program_id(1)
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    total = tl.zeros((OUT, IN), tl.float32)
    for step in range(steps):
        pixel = (part * steps + step) * PIXELS + tl.arange(0, PIXELS)
        base = pixel.to(tl.int64) * rows + row
        live = pixel < pixels
        values = tl.load(x + base[:, None] * inputs + i[None, :], mask=live[:, None] & (i < inputs)[None, :], other=0.0)
        slopes = tl.load(
            g + base[None, :] * outputs + o[:, None], mask=live[None, :] & (o < outputs)[:, None], other=0.0
        )
        total += tl.dot(slopes, values, input_precision="ieee")
    target = ((part * rows + row) * outputs + o[:, None]) * inputs + i[None, :]
    tl.store(partial + target, total, mask=(o < outputs)[:, None] & (i < inputs)[None, :])


MIX_PIXELS = 128
MIX_STEPS = 32


def _mix(x: Tensor, weight: Tensor, outputs: int, stride_out: int, stride_in: int) -> Tensor:
    *space, rows, inputs = x.shape
    pixels = x.numel() // (rows * inputs)
    y = torch.empty(*space, rows, outputs, device=x.device, dtype=x.dtype)
    sizes = max(16, triton.next_power_of_2(inputs)), max(16, triton.next_power_of_2(outputs))
    grid = triton.cdiv(pixels, MIX_PIXELS), rows
    _mix_kernel[grid](x, weight, y, pixels, rows, inputs, outputs, stride_out, stride_in, MIX_PIXELS, *sizes)
    return y


class _MixChannels(torch.autograd.Function):
    """x (…, R, I), weight (R, O, I) → (…, R, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return _mix(x, weight, weight.shape[1], weight.shape[2], 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        g = g.contiguous()
        rows, outputs, inputs = weight.shape
        dx = _mix(g, weight, inputs, 1, inputs) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None
        pixels = x.numel() // (rows * inputs)
        parts = triton.cdiv(pixels, MIX_PIXELS * MIX_STEPS)
        partial = torch.empty(parts, rows, outputs, inputs, device=x.device, dtype=torch.float32)
        sizes = max(16, triton.next_power_of_2(inputs)), max(16, triton.next_power_of_2(outputs))
        _mix_weight_kernel[parts, rows](x, g, partial, pixels, rows, MIX_STEPS, inputs, outputs, MIX_PIXELS, *sizes)
        return dx, partial.sum(0).to(weight.dtype)


def mix_channels(x: Tensor, weight: Tensor) -> Tensor:
    """A linear map of the channels of every row: x (…, R, I), weight (R, O, I) → (…, R, O)."""
    return _MixChannels.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]
