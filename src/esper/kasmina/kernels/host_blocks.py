"""CUDA kernels for rows of channels-last images: a matrix (pixels, columns), with the channels of all rows as columns.

- `resize_channels`: pads or cuts the channels per row, at the speed of a copy. Can mark rows that are not finite.
- `mix_channels`: the 1×1 convolution of every row, for which cuDNN would launch a kernel per row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.kasmina.kernels.launching import kernel


@kernel
def _resize_kernel(  # type: ignore[no-untyped-def]
    x, y, marks, elements, rows, before: tl.constexpr, after: tl.constexpr, marked: tl.constexpr,
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


@kernel
def _mix_kernel(  # type: ignore[no-untyped-def]
    x, weight, y, pixels, rows, inputs: tl.constexpr, outputs: tl.constexpr, stride_out, stride_in,
    PIXELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """y[p, r, o] = Σ_i x[p, r, i]·weight[r, o, i] for a block of pixels and of outputs of one row."""
    row = tl.program_id(1)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    o = tl.program_id(2) * OUT + tl.arange(0, OUT)
    base = (pixel.to(tl.int64) * rows + row)[:, None]
    mixed = tl.zeros((PIXELS, OUT), tl.float32)
    for first in tl.static_range(0, inputs, IN):
        i = first + tl.arange(0, IN)
        values = tl.load(
            x + base * inputs + i[None, :], mask=(pixel < pixels)[:, None] & (i < inputs)[None, :], other=0.0
        )
        kernel = tl.load(
            weight + row * inputs * outputs + o[None, :] * stride_out + i[:, None] * stride_in,
            mask=(i < inputs)[:, None] & (o < outputs)[None, :],
            other=0.0,
        )
        mixed += tl.dot(values, kernel, input_precision="ieee")
    tl.store(y + base * outputs + o[None, :], mixed, mask=(pixel < pixels)[:, None] & (o < outputs)[None, :])


@kernel
def _mix_weight_kernel(  # type: ignore[no-untyped-def]
    x, g, partial, pixels, rows, steps, inputs: tl.constexpr, outputs: tl.constexpr,
    PIXELS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Per program: Σ_p g[p, r, o]·x[p, r, i] over some pixels of one row, for a block of outputs and inputs."""
    part, row = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = (inputs + IN - 1) // IN
    i = tl.program_id(2) % blocks * IN + tl.arange(0, IN)
    o = tl.program_id(2) // blocks * OUT + tl.arange(0, OUT)
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
MIX_CHANNELS = 64
"""Of a block. Two blocks of 128 pixels and 64 channels in float32, read ahead, take under 200 KiB of shared memory."""


def _block(channels: int) -> int:
    """Channels that a program has at once; a product needs at least 16."""
    power: int = triton.next_power_of_2(channels)
    return min(MIX_CHANNELS, max(16, power))


def _mix(x: Tensor, weight: Tensor, outputs: int, stride_out: int, stride_in: int) -> Tensor:
    *space, rows, inputs = x.shape
    pixels = x.numel() // (rows * inputs)
    y = torch.empty(*space, rows, outputs, device=x.device, dtype=x.dtype)
    sizes = _block(inputs), _block(outputs)
    grid = triton.cdiv(pixels, MIX_PIXELS), rows, triton.cdiv(outputs, sizes[1])
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
        sizes = _block(inputs), _block(outputs)
        blocks = triton.cdiv(inputs, sizes[0]) * triton.cdiv(outputs, sizes[1])
        grid = parts, rows, blocks
        _mix_weight_kernel[grid](x, g, partial, pixels, rows, MIX_STEPS, inputs, outputs, MIX_PIXELS, *sizes)
        return dx, partial.sum(0).to(weight.dtype)


def mix_channels(x: Tensor, weight: Tensor) -> Tensor:
    """A linear map of the channels of every row: x (…, R, I), weight (R, O, I) → (…, R, O)."""
    return _MixChannels.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]
