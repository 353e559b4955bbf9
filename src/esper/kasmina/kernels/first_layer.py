"""CUDA kernels of a convolution that reads inputs, which several rows may share.

With p a pixel, k a tap and channel, and the patch X[p, k] the input under tap k, row r has

    y[p, r, o] = Σ_k X[p, k]·W[r, o, k],   ∂L/∂W[r, o, k] = Σ_p X[p, k]·∂L/∂y[p, r, o]

Inputs have few channels, so a patch is one short line, gathered once for all rows of a tile: rows that see the same
inputs. The kernels read images (rows, batch, height, width, channels) and write (batch, height, width, rows, channels).
Inputs get no gradient. Sums over pixels are made in two steps, always in the same order. In plain torch this is
`F.conv2d`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kasmina.kernels.launching import kernel

PIXELS = 128  # of a tile
STEPS = 8  # tiles per program, which loads its weights once
PROGRAMS = 2048  # that fill the device, for the gradient of weights
MOST_TAPS = 128  # taps × channels of a patch
MOST_COLUMNS = 64  # rows × channels of a product


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _patches(  # type: ignore[no-untyped-def]
    image, pixel, seen, height, width, CHANNELS: tl.constexpr, SIDE: tl.constexpr, TAPS: tl.constexpr  # noqa: N803
):  # fmt: skip
    """(pixels, taps × channels); 0 outside of the image."""
    k = tl.arange(0, TAPS)
    down = (k // CHANNELS // SIDE - SIDE // 2)[None, :]
    right = (k // CHANNELS % SIDE - SIDE // 2)[None, :]
    y = (pixel // width % height)[:, None] + down
    x = (pixel % width)[:, None] + right
    inside = seen[:, None] & (k < CHANNELS * SIDE * SIDE)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    offset = (pixel[:, None] + down * width + right) * CHANNELS + (k % CHANNELS)[None, :]
    return tl.load(image + offset, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(  # type: ignore[no-untyped-def]
    tiles, tile, OUTPUTS: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Of the columns of a product: their row, their place among all rows' channels, and whether they exist."""
    column = tl.arange(0, COLUMNS)
    member = tl.program_id(2) * ROWS + column // OUTPUTS
    exists = (column < ROWS * OUTPUTS) & (member < MEMBERS)
    row = tl.load(tiles + tile * MEMBERS + member, mask=exists, other=-1)
    return row * OUTPUTS + column % OUTPUTS, exists & (row >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def _weights_at(target, CHANNELS: tl.constexpr, SIDE: tl.constexpr, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Where the weights (taps × channels, columns) lie, and which of them exist."""
    k = tl.arange(0, TAPS)
    inner = (k % CHANNELS) * (SIDE * SIDE) + k // CHANNELS
    return target[None, :] * (CHANNELS * SIDE * SIDE) + inner[:, None], (k < CHANNELS * SIDE * SIDE)[:, None]


@kernel
def _convolve_kernel(  # type: ignore[no-untyped-def]
    x, weight, tiles, y, pixels, height, width, row_stride, all_columns,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, SIDE: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
    TAPS: tl.constexpr, COLUMNS: tl.constexpr, PIXELS: tl.constexpr, STEPS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Some pixels of some rows of a tile per program."""
    tile = tl.program_id(1)
    image = x + tl.load(tiles + tile * MEMBERS).to(tl.int64) * row_stride
    target, exists = _columns(tiles, tile, OUTPUTS, MEMBERS, ROWS, COLUMNS)
    index, known = _weights_at(target, CHANNELS, SIDE, TAPS)
    kernel = tl.load(weight + index, mask=known & exists[None, :], other=0.0)
    for step in range(STEPS):
        pixel = (tl.program_id(0) * STEPS + step) * PIXELS + tl.arange(0, PIXELS)
        seen = pixel < pixels
        patch = _patches(image, pixel, seen, height, width, CHANNELS, SIDE, TAPS)
        product = tl.dot(patch, kernel, input_precision="ieee")
        place = pixel.to(tl.int64)[:, None] * all_columns + target[None, :]
        tl.store(y + place, product, mask=seen[:, None] & exists[None, :])


@kernel
def _weight_kernel(  # type: ignore[no-untyped-def]
    x, gradient, tiles, sums, pixels, per, height, width, row_stride, all_columns,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, SIDE: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
    TAPS: tl.constexpr, COLUMNS: tl.constexpr, PIXELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Per program, the sum over `per` pixels: `sums` (programs, rows, outputs, channels, side, side)."""
    tile = tl.program_id(1)
    image = x + tl.load(tiles + tile * MEMBERS).to(tl.int64) * row_stride
    target, exists = _columns(tiles, tile, OUTPUTS, MEMBERS, ROWS, COLUMNS)
    total = tl.zeros((TAPS, COLUMNS), tl.float32)
    begin = tl.program_id(0) * per
    for first in range(begin, tl.minimum(begin + per, pixels), PIXELS):
        pixel = first + tl.arange(0, PIXELS)
        seen = pixel < pixels
        patch = _patches(image, pixel, seen, height, width, CHANNELS, SIDE, TAPS)
        place = pixel.to(tl.int64)[:, None] * all_columns + target[None, :]
        d = tl.load(gradient + place, mask=seen[:, None] & exists[None, :], other=0.0)
        total = tl.dot(tl.trans(patch), d, total, input_precision="ieee")
    index, known = _weights_at(target, CHANNELS, SIDE, TAPS)
    start = tl.program_id(0).to(tl.int64) * all_columns * (CHANNELS * SIDE * SIDE)
    tl.store(sums + start + index, total, mask=known & exists[None, :])


class _Shape(NamedTuple):
    """Sizes that both kernels need."""

    channels: int
    outputs: int
    side: int
    members: int

    @property
    def rows(self) -> int:
        """Rows of a tile that one program takes."""
        return max(1, min(self.members, MOST_COLUMNS // self.outputs))

    @property
    def chunks(self) -> int:
        """Programs that share the rows of a tile."""
        return int(triton.cdiv(self.members, self.rows))

    @property
    def names(self) -> dict[str, int]:
        """For the kernels."""
        taps, columns = (
            max(16, triton.next_power_of_2(size)) for size in (self.channels * self.side**2, self.rows * self.outputs)
        )
        sizes = {"CHANNELS": self.channels, "OUTPUTS": self.outputs, "SIDE": self.side, "MEMBERS": self.members}
        return sizes | {"ROWS": self.rows, "TAPS": taps, "COLUMNS": columns, "PIXELS": PIXELS}


def convolve_inputs(images: Tensor, weight: Tensor, tiles: Tensor) -> Tensor:
    """(B, H, W, R, O) of images (R, B, H, W, C), each contiguous, and weight (R, O, C, k, k)."""
    _, batch, height, width, _ = images.shape
    rows, shape = len(weight), _shape(weight, tiles)
    y = torch.empty(batch, height, width, rows, shape.outputs, device=images.device, dtype=images.dtype)
    pixels = batch * height * width
    grid = (triton.cdiv(pixels, PIXELS * STEPS), len(tiles), shape.chunks)
    _convolve_kernel[grid](
        images, weight, tiles, y, pixels, height, width, images.stride(0), rows * shape.outputs,
        **shape.names, STEPS=STEPS,
    )  # fmt: skip
    return y


def weight_gradient(images: Tensor, gradient: Tensor, like: Tensor, tiles: Tensor) -> Tensor:
    """∂L/∂W, shaped `like` the weight, from ∂L/∂y (B, H, W, R, O)."""
    _, batch, height, width, _ = images.shape
    rows, shape = len(like), _shape(like, tiles)
    pixels = batch * height * width
    splits = max(1, PROGRAMS // (len(tiles) * shape.chunks))
    per = triton.cdiv(triton.cdiv(pixels, splits), PIXELS) * PIXELS
    splits = triton.cdiv(pixels, per)
    sums = torch.empty(splits, *like.shape, device=like.device, dtype=torch.float32)
    _weight_kernel[(splits, len(tiles), shape.chunks)](
        images, gradient, tiles, sums, pixels, per, height, width, images.stride(0), rows * shape.outputs,
        **shape.names,
    )  # fmt: skip
    return sums.sum(0).to(like.dtype)


def _shape(weight: Tensor, tiles: Tensor) -> _Shape:
    _, outputs, channels, side, _ = weight.shape
    return _Shape(channels, outputs, side, tiles.shape[1])


class _InputConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, tiles: Tensor) -> Tensor:
        weight = weight.contiguous()
        ctx.save_for_backward(images, weight, tiles)
        return convolve_inputs(images, weight, tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, tiles = ctx.saved_tensors
        return None, weight_gradient(images, gradient.contiguous(), weight, tiles), None


def input_conv(x: Tensor, weight: Tensor, tiles: Tensor) -> Tensor:
    """The convolution of inputs x (R, B, C, H, W), stored as (B, H, W, R, O). Rows may have one image in memory.

    `tiles` (T, members) holds the numbers of rows that see the same inputs, −1 where a tile has fewer.
    """
    shared = x.stride(0) == 0
    stored = (x[:1] if shared else x).permute(0, 1, 3, 4, 2).contiguous()
    if shared:
        stored = stored.expand(len(x), *stored.shape[1:])
    return _InputConv.apply(stored, weight, tiles)  # type: ignore[no-any-return, no-untyped-call]
