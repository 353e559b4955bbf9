"""CUDA kernels for rows of images that are stored as a matrix (batch, pixels, rows·channels).

In this layout torch's group norm copies to channels-first and back, and its sums over pixels and gathers of rows reach
a quarter of the memory bandwidth.

- `take_stored`: gathers rows.
- `scale_stored`: multiplies by a factor per channel.
- `group_norm_stored`: group normalisation.
- `same_conv`: a grouped convolution whose backward pass is one too.
- `draw_rows`: gathers, shifts, flips and normalises the images of a minibatch in one pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kasmina.kernels.host_blocks import resize_channels
from esper.kasmina.kernels.launching import kernel

TILE = 2048  # numbers per program and loop step
COLUMNS = 128  # of such a tile


@kernel
def _take_kernel(  # type: ignore[no-untyped-def]
    x, rows, out, pixels, before, entries, channels, PIXELS: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """A block of pixels and of columns per program."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < entries * channels
    row = tl.load(rows + column // channels, mask=inside, other=0)
    source = row * channels + column % channels
    seen = (pixel < pixels)[:, None] & inside[None, :]
    wide = pixel.to(tl.int64)[:, None]
    value = tl.load(x + wide * (before * channels) + source[None, :], mask=seen)
    tl.store(out + wide * (entries * channels) + column[None, :], value, mask=seen)


def take_stored(x: Tensor, rows: Tensor) -> Tensor:
    """(B, H, W, R, C) → (B, H, W, E, C)."""
    batch, height, width, before, channels = x.shape
    out = x.new_empty(batch, height, width, len(rows), channels)
    pixels, columns = batch * height * width, len(rows) * channels
    block = min(triton.next_power_of_2(columns), COLUMNS)
    across = TILE // block
    grid = (triton.cdiv(pixels, across), triton.cdiv(columns, block))
    _take_kernel[grid](x, rows, out, pixels, before, len(rows), channels, across, block)
    return out


@kernel
def _scale_kernel(  # type: ignore[no-untyped-def]
    x, weight, gradient, out, sums, pixels, columns,
    backward: tl.constexpr, PER: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """out = weight · (x or the gradient); backwards also Σ gradient·x of PER pixels."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, PER, PIXELS):
        pixel = tl.program_id(0) * PER + step + tl.arange(0, PIXELS)
        seen = (pixel < pixels)[:, None] & inside[None, :]
        index = pixel.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + index, mask=seen, other=0.0).to(tl.float32)
        if backward:
            g = tl.load(gradient + index, mask=seen, other=0.0).to(tl.float32)
            total += tl.sum(g * value, 0)
            value = g
        tl.store(out + index, factor[None, :] * value, mask=seen)
    if backward:
        tl.store(sums + tl.program_id(0) * columns + column, total, mask=inside)


class _ScaleRows(torch.autograd.Function):
    """x (P, columns) times weight (columns,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _ScaleRows.launch(x, weight, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        out, sums = _ScaleRows.launch(x, weight, gradient.contiguous())
        return out, sums.sum(0).to(weight.dtype)

    @staticmethod
    def launch(x: Tensor, weight: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        pixels, columns = x.shape
        block = min(triton.next_power_of_2(columns), COLUMNS)
        across = TILE // block
        per = 16 * across if gradient is not None else across
        parts = triton.cdiv(pixels, per)
        out = torch.empty_like(x)
        sums = x.new_empty(parts if gradient is not None else 0, columns, dtype=torch.float32)
        _scale_kernel[(parts, triton.cdiv(columns, block))](
            x, weight, x if gradient is None else gradient, out, sums, pixels, columns,
            gradient is not None, per, across, block,
        )  # fmt: skip
        return out, sums


def scale_stored(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, H, W, R, C) times weight (R, C)."""
    scaled: Tensor = _ScaleRows.apply(x.contiguous().view(-1, weight.numel()), weight.flatten())  # type: ignore[no-untyped-call]
    return scaled.view(x.shape)


@triton.jit  # type: ignore[untyped-decorator]
def tile(sample, start, pixels, column, inside, columns, PIXELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Indices of a sample's next pixels, and which of them exist."""
    pixel = start + tl.arange(0, PIXELS)
    seen = (pixel < pixels)[:, None] & inside[None, :]
    return (sample * pixels + pixel).to(tl.int64)[:, None] * columns + column[None, :], seen


@triton.jit  # type: ignore[untyped-decorator]
def _per_column(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A number per group, for each of its columns."""
    return tl.reshape(tl.broadcast_to(x[:, None], (GROUPS, WIDTH)), (GROUPS * WIDTH,))


@triton.jit  # type: ignore[untyped-decorator]
def _per_group(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The sum over each group's columns."""
    return tl.sum(tl.reshape(x, (GROUPS, WIDTH)), 1)


@kernel
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, means, scales, pixels, columns, groups, eps,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One sample and a block of groups per program: mean, then variance, then the result."""
    sample = tl.program_id(0)
    column = tl.program_id(1) * GROUPS * WIDTH + tl.arange(0, GROUPS * WIDTH)
    inside = column < columns
    count = pixels * WIDTH
    total = tl.zeros((GROUPS * WIDTH,), tl.float32)
    for start in range(0, pixels, PIXELS):
        index, seen = tile(sample, start, pixels, column, inside, columns, PIXELS)
        total += tl.sum(tl.load(x + index, mask=seen, other=0.0).to(tl.float32), 0)
    mean = _per_group(total, GROUPS, WIDTH) / count
    spread = _per_column(mean, GROUPS, WIDTH)
    square = tl.zeros((GROUPS * WIDTH,), tl.float32)
    for start in range(0, pixels, PIXELS):
        index, seen = tile(sample, start, pixels, column, inside, columns, PIXELS)
        away = tl.where(seen, tl.load(x + index, mask=seen, other=0.0).to(tl.float32) - spread[None, :], 0.0)
        square += tl.sum(away * away, 0)
    scale = 1.0 / tl.sqrt(_per_group(square, GROUPS, WIDTH) / count + eps)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tl.store(means + sample * groups + group, mean, mask=group < groups)
    tl.store(scales + sample * groups + group, scale, mask=group < groups)
    factor = _per_column(scale, GROUPS, WIDTH)
    factor = factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) - factor * spread
    for start in range(0, pixels, PIXELS):
        index, seen = tile(sample, start, pixels, column, inside, columns, PIXELS)
        value = tl.load(x + index, mask=seen, other=0.0).to(tl.float32)
        tl.store(out + index, factor[None, :] * value + offset[None, :], mask=seen)


@kernel
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    x, weight, means, scales, gradient, out, to_weight, to_bias, pixels, columns, groups,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """With x̂ = (x − mean)·scale and a = weight·gradient: scale·(a − mean(a) − x̂·mean(a·x̂)), means over the group."""
    sample = tl.program_id(0)
    column = tl.program_id(1) * GROUPS * WIDTH + tl.arange(0, GROUPS * WIDTH)
    inside = column < columns
    group = column // WIDTH
    mean = tl.load(means + sample * groups + group, mask=inside, other=0.0)
    scale = tl.load(scales + sample * groups + group, mask=inside, other=0.0)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    plain = tl.zeros((GROUPS * WIDTH,), tl.float32)
    along = tl.zeros((GROUPS * WIDTH,), tl.float32)
    for start in range(0, pixels, PIXELS):
        index, seen = tile(sample, start, pixels, column, inside, columns, PIXELS)
        g = tl.load(gradient + index, mask=seen, other=0.0).to(tl.float32)
        normal = (tl.load(x + index, mask=seen, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        plain += tl.sum(g, 0)
        along += tl.sum(g * normal, 0)
    tl.store(to_bias + sample * columns + column, plain, mask=inside)
    tl.store(to_weight + sample * columns + column, along, mask=inside)
    count = pixels * WIDTH
    level = _per_group(w * plain, GROUPS, WIDTH) / count
    slope = _per_group(w * along, GROUPS, WIDTH) / count
    level = _per_column(level, GROUPS, WIDTH)
    slope = _per_column(slope, GROUPS, WIDTH)
    for start in range(0, pixels, PIXELS):
        index, seen = tile(sample, start, pixels, column, inside, columns, PIXELS)
        g = tl.load(gradient + index, mask=seen, other=0.0).to(tl.float32)
        normal = (tl.load(x + index, mask=seen, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        value = scale[None, :] * (w[None, :] * g - level[None, :] - normal * slope[None, :])
        tl.store(out + index, value, mask=seen)


class _GroupNorm(torch.autograd.Function):
    """x (B, pixels, columns) in groups of `width` neighbouring columns, a power of two of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, width: int, eps: float) -> Tensor:
        batch, pixels, columns = x.shape
        groups = columns // width
        means, scales = x.new_empty(2, batch, groups, dtype=torch.float32)
        out = torch.empty_like(x)
        tile = _norm_tile(columns, width)
        grid = (batch, triton.cdiv(groups, tile["GROUPS"]))
        _norm_kernel[grid](x, weight, bias, out, means, scales, pixels, columns, groups, eps, **tile)
        ctx.save_for_backward(x, weight, means, scales)
        ctx.width = width
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, means, scales = ctx.saved_tensors
        batch, pixels, columns = x.shape
        groups = columns // ctx.width
        out = torch.empty_like(x)
        sums = x.new_empty(2, batch, columns, dtype=torch.float32)
        tile = _norm_tile(columns, ctx.width)
        grid = (batch, triton.cdiv(groups, tile["GROUPS"]))
        _norm_backward_kernel[grid](
            x, weight, means, scales, gradient.contiguous(), out, sums[0], sums[1], pixels, columns, groups, **tile
        )
        to_weight, to_bias = sums.sum(1).to(weight.dtype)
        return out, to_weight, to_bias, None, None


def _norm_tile(columns: int, width: int) -> dict[str, int]:
    block = max(width, min(triton.next_power_of_2(columns), COLUMNS))
    return {"PIXELS": max(1, TILE // block), "GROUPS": block // width, "WIDTH": width}


def group_norm_stored(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """x (B, H, W, R, C), weight and bias (R, C), `groups` of each row; their width must be a power of two."""
    batch, channels = x.shape[0], x.shape[-1]
    y: Tensor = _GroupNorm.apply(  # type: ignore[no-untyped-call]
        x.contiguous().view(batch, -1, weight.numel()), weight.flatten(), bias.flatten(), channels // groups, eps
    )
    return y.view(x.shape)


class _SameConv(torch.autograd.Function):
    """A grouped convolution with as many channels out as in. Its input's gradient is one more such convolution, with
    kernels turned round and channels exchanged: cuDNN's own runs group by group at some widths."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, marks: Tensor) -> Tensor:
        kernels = _marked(weight, marks[0])
        ctx.save_for_backward(x, kernels, marks)
        return torch.conv2d(x, kernels, padding=kernels.shape[-1] // 2, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernels, marks = ctx.saved_tensors
        pad, groups, width = kernels.shape[-1] // 2, marks.shape[1], kernels.shape[1]
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        to_x = to_weight = None
        if ctx.needs_input_grad[1]:
            _, to_weight, _ = torch.ops.aten.convolution_backward(
                gradient, x, kernels, None, [1, 1], [pad, pad], [1, 1], False, [0, 0], groups, [False, True, False]
            )
            to_weight = to_weight.unflatten(0, (groups, width))
        if ctx.needs_input_grad[0]:
            finite = resize_channels(gradient.permute(0, 2, 3, 1).unflatten(-1, (groups, width)), width, marks[1])
            turned = kernels.unflatten(0, (groups, width)).transpose(1, 2).flip(3, 4)
            to_x = torch.conv2d(
                finite.flatten(-2).permute(0, 3, 1, 2), _marked(turned, marks[1]), padding=pad, groups=groups
            )
        return to_x, to_weight, None


def _marked(weight: Tensor, marks: Tensor) -> Tensor:
    """weight (G, O, I, k, k) plus marks (G,), as the kernels (G·O, I, k, k) of a convolution, channels last.

    cuDNN would copy kernels into that layout anyway, so the marks cost nothing."""
    groups, outputs, inputs, *side = weight.shape
    kernels = weight.new_empty(groups, outputs, *side, inputs).permute(0, 1, 4, 2, 3)
    torch.add(weight, marks[:, None, None, None, None], out=kernels)
    return kernels.flatten(0, 1)


def same_conv(x: Tensor, weight: Tensor, marks: Tensor) -> Tensor:
    """x (B, G·C, H, W), finite, weight (G, C, C, k, k) with odd k. Gradients may be anything.

    cuDNN multiplies a group's channels with the zeros between the groups' weights too, and 0 · NaN is NaN. So what a
    convolution reads must be finite; a NaN in the weights stays in its group. `marks` (2, G) are NaN where x was not
    finite before, else 0; the second line is for the gradient, and zero.
    """
    return _SameConv.apply(x, weight, marks)  # type: ignore[no-any-return, no-untyped-call]


@kernel
def _draw_kernel(  # type: ignore[no-untyped-def]
    images, chosen, down, right, flip, group, scale, offset, out,
    batch, height, width, shift, channels: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One image of one row per program; `out` is (rows, batch, height, width, channels)."""
    row, sample = tl.program_id(1), tl.program_id(0)
    index = tl.load(group + row) * batch + sample
    below, beside = tl.load(down + index) - shift, tl.load(right + index) - shift
    mirrored = tl.load(flip + index) != 0
    size = height * width * channels
    source = images + tl.load(chosen + index).to(tl.int64) * size
    target = out + (row.to(tl.int64) * batch + sample) * size
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < size
        channel, column = place % channels, place // channels % width
        y = place // (width * channels) + below
        x = tl.where(mirrored, width - 1 - column, column) + beside
        seen = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        value = tl.load(source + (y * width + x) * channels + channel, mask=seen, other=0).to(tl.float32)
        a = tl.load(scale + channel, mask=inside, other=0.0)
        b = tl.load(offset + channel, mask=inside, other=0.0)
        tl.store(target + place, value * a + b, mask=inside)


def draw_rows(
    images: Tensor,
    chosen: Tensor,
    moves: tuple[Tensor, Tensor, Tensor],
    group: Tensor,
    scale: Tensor,
    offset: Tensor,
    *,
    shift: int,
    dtype: torch.dtype,
) -> Tensor:
    """(R, B, C, H, W) with the channels innermost: images (N, H, W, C) of uint8 by number (G, B), moved down and right,
    flipped, times scale plus offset per channel; `group` (R,) says whose draw each row takes."""
    _, height, width, channels = images.shape
    batch = chosen.shape[1]
    out = torch.empty(len(group), batch, height, width, channels, device=images.device, dtype=dtype)
    block = min(TILE, triton.next_power_of_2(height * width * channels))
    _draw_kernel[batch, len(group)](
        images, chosen, *moves, group, scale, offset, out, batch, height, width, shift, channels, block
    )
    return out.permute(0, 1, 4, 2, 3)
