"""CUDA kernels for the k×k convolution of every row: y[r] = W[r] ∗ x[r], with images (batch, height, width, rows, C).

cuDNN runs grouped convolutions fast only with as many channels in as out, and mixes neighbouring groups, so that rows
which are not finite need care. Here a program takes some samples of one row, and reads nothing of any other. With few
channels (an RGB image) all taps are one matrix product; else there is a product per tap.

Backwards, ∂L/∂x is the transposed convolution. ∂L/∂W is summed per program over its samples, then over programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.kasmina.kernels.seeds import _at, _cells, _convolve, _read, _write
from esper.kasmina.row_layout import living

MOST_CHANNELS = 32  # beyond this, cuDNN is faster
FEW_INPUTS = 32  # taps × channels that are one product
SPLITS = 32  # programs per row
CELLS = 256  # of a tile
OPTIONS = {"num_warps": 8}


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _gather(  # type: ignore[no-untyped-def]
    base, stride, sample, pixel, seen, height, width,
    FROM: tl.constexpr, SIDE: tl.constexpr, KEYS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """(cells, KEYS): what lies under each tap, all its channels one after the other."""
    key = tl.arange(0, KEYS)[None, :]
    tap = key // FROM
    y = (pixel // width)[:, None] + (tap // SIDE - SIDE // 2)
    x = (pixel % width)[:, None] + (tap % SIDE - SIDE // 2)
    inside = seen[:, None] & (key < FROM * SIDE * SIDE) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    offsets = ((sample[:, None] * (height * width) + y * width + x) * stride).to(tl.int32) + key % FROM
    return tl.load(base + offsets, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve_kernel(  # type: ignore[no-untyped-def]
    x, weight, y, living, rows, batch, per, height, width,
    FROM: tl.constexpr, TO: tl.constexpr, SIDE: tl.constexpr, TURNED: tl.constexpr, KEYS: tl.constexpr,  # noqa: N803
    SAMPLES: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, FROM_WIDE: tl.constexpr, TO_WIDE: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Some samples of one row per program. KEYS > 0: all taps in one product of that depth."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * per
    end = tl.minimum(begin + per, batch)
    if PADDED:
        end = tl.where(tl.load(living + row) != 0, end, begin)
    pixels = height * width
    own = weight + row * (FROM * TO * SIDE * SIDE)
    channel = tl.arange(0, TO_WIDE)
    stride = row * 0 + rows * FROM
    apart = row * 0 + rows * TO
    for first in range(begin, end, SAMPLES):
        source = x + row * FROM + first * pixels * stride
        target = y + row * TO + first * pixels * apart
        for tile in range(TILES):
            sample, pixel, seen = _cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
            if KEYS > 0:
                value = _gather(source, stride, sample, pixel, seen, height, width, FROM, SIDE, KEYS)
                key = tl.arange(0, KEYS)[:, None]
                index = (channel[None, :] * FROM + key % FROM) * (SIDE * SIDE) + key // FROM
                mask = (key < FROM * SIDE * SIDE) & (channel < TO)[None, :]
                kernel = tl.load(own + index, mask=mask, other=0.0)
                result = tl.dot(value, kernel.to(value.dtype), input_precision="ieee")
            else:
                result = _convolve(
                    source, stride, own, sample, pixel, seen, height, width,
                    FROM, TO, SIDE, False, TURNED, FROM_WIDE, TO_WIDE,
                )  # fmt: skip
            _write(target, _at(sample, pixel, pixels, apart), seen, channel, result, TO)


@triton.jit  # type: ignore[untyped-decorator]
def _weight_kernel(  # type: ignore[no-untyped-def]
    x, g, sums, rows, batch, per, height, width,
    FROM: tl.constexpr, TO: tl.constexpr, SIDE: tl.constexpr, KEYS: tl.constexpr,  # noqa: N803
    SAMPLES: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, FROM_WIDE: tl.constexpr, TO_WIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Σ x·∂L/∂y over some samples of one row: for one tap per program, or with KEYS for all of them."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * per
    end = tl.minimum(begin + per, batch)
    tap = tl.program_id(2)
    pixels = height * width
    stride = row * 0 + rows * FROM
    apart = row * 0 + rows * TO
    made = tl.arange(0, TO_WIDE)
    depth: tl.constexpr = KEYS if KEYS > 0 else FROM_WIDE
    read = tl.arange(0, depth)
    total = tl.zeros((depth, TO_WIDE), tl.float32)
    for first in range(begin, end, SAMPLES):
        source = x + row * FROM + first * pixels * stride
        gradient = g + row * TO + first * pixels * apart
        for tile in range(TILES):
            sample, pixel, seen = _cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
            if KEYS > 0:
                value = _gather(source, stride, sample, pixel, seen, height, width, FROM, SIDE, KEYS)
            else:
                down = pixel // width + (tap // SIDE - SIDE // 2)
                right = pixel % width + (tap % SIDE - SIDE // 2)
                inside = seen & (down >= 0) & (down < height) & (right >= 0) & (right < width)
                value = _read(source, _at(sample, down * width + right, pixels, stride), inside, read, FROM)
            d = _read(gradient, _at(sample, pixel, pixels, apart), seen, made, TO)
            total = tl.dot(tl.trans(value), d, total, input_precision="ieee")
    share = sums + (row * tl.num_programs(1) + tl.program_id(1)) * (FROM * TO * SIDE * SIDE)
    if KEYS > 0:
        index = (made[None, :] * FROM + (read % FROM)[:, None]) * (SIDE * SIDE) + (read // FROM)[:, None]
        mask = (read < FROM * SIDE * SIDE)[:, None] & (made < TO)[None, :]
    else:
        index = (made[None, :] * FROM + read[:, None]) * (SIDE * SIDE) + tap
        mask = (read < FROM)[:, None] & (made < TO)[None, :]
    tl.store(share + index, total, mask=mask)


def _sizes(batch: int, height: int, width: int, inputs: int, outputs: int, side: int) -> tuple[int, dict[str, int]]:
    """Samples per program, and the sizes of tiles."""
    wide = min(CELLS, triton.next_power_of_2(height * width))
    samples = CELLS // wide
    per = triton.cdiv(triton.cdiv(batch, SPLITS), samples) * samples
    keys = triton.next_power_of_2(max(16, inputs * side**2)) if inputs * side**2 <= FEW_INPUTS else 0
    return per, {
        "FROM": inputs,
        "TO": outputs,
        "SIDE": side,
        "KEYS": keys,
        "SAMPLES": samples,
        "WIDE": wide,
        "TILES": triton.cdiv(height * width, wide),
        "FROM_WIDE": max(16, triton.next_power_of_2(inputs)),
        "TO_WIDE": max(16, triton.next_power_of_2(outputs)),
    }


def _convolved(
    x: Tensor, weight: Tensor, outputs: int, side: int, living_rows: Tensor | None, *, turned: bool
) -> Tensor:
    batch, height, width, rows, inputs = x.shape
    y = x.new_empty(batch, height, width, rows, outputs)
    per, sizes = _sizes(batch, height, width, inputs, outputs, side)
    sizes = sizes | {"KEYS": 0 if turned else sizes["KEYS"], "TURNED": turned, "PADDED": living_rows is not None}
    some = x if living_rows is None else living_rows
    _convolve_kernel[(rows, triton.cdiv(batch, per))](
        x, weight, y, some, rows, batch, per, height, width, **sizes, **OPTIONS
    )
    return y


class _ConvolveRows(torch.autograd.Function):
    """x (B, H, W, R, I), weight (R, O, I, k, k) → (B, H, W, R, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.living = living(len(weight))
        return _convolved(x, weight, weight.shape[1], weight.shape[-1], ctx.living, turned=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        batch, height, width, rows, inputs = x.shape
        _, outputs, _, side, _ = weight.shape
        gradient = gradient.contiguous()
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = _convolved(gradient, weight, inputs, side, ctx.living, turned=True)
        if ctx.needs_input_grad[1]:
            per, sizes = _sizes(batch, height, width, inputs, outputs, side)
            splits, taps = triton.cdiv(batch, per), 1 if sizes["KEYS"] else side**2
            sums = torch.empty(rows, splits, *weight.shape[1:], device=x.device, dtype=torch.float32)
            _weight_kernel[(rows, splits, taps)](x, gradient, sums, rows, batch, per, height, width, **sizes, **OPTIONS)
            to_weight = sums.sum(1).to(weight.dtype)
        return to_x, to_weight


def convolve_rows(x: Tensor, weight: Tensor) -> Tensor:
    """The "same" convolution of every row: x (B, H, W, R, I), weight (R, O, I, k, k) with odd k → (B, H, W, R, O)."""
    return _ConvolveRows.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]
