"""The CUDA kernel that draws a minibatch: gather, shift, flip and normalise in one pass, in the layout of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _draw_kernel(  # type: ignore[no-untyped-def]
    images, chosen, down, right, flip, group, scale, offset, out,
    batch, height, width, shift,
    channels: tl.constexpr, columns: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One line of one sample of all rows per program; `out` is (batch, height, width, rows·channels)."""
    sample, line = tl.program_id(0) // height, tl.program_id(0) % height
    column = tl.arange(0, BLOCK)
    inside = column < columns
    row, channel = column // channels, column % channels
    place = tl.load(group + row, mask=inside, other=0) * batch + sample
    image = tl.load(chosen + place, mask=inside, other=0).to(tl.int64)
    y = line + tl.load(down + place, mask=inside, other=0) - shift
    x_shift = tl.load(right + place, mask=inside, other=0) - shift
    mirrored = tl.load(flip + place, mask=inside, other=0) != 0
    a = tl.load(scale + channel, mask=inside, other=0.0)
    b = tl.load(offset + channel, mask=inside, other=0.0)
    start = (image * height + y) * width
    for step in range(width):
        x = tl.where(mirrored, width - 1 - step, step) + x_shift
        seen = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        value = tl.load(images + (start + x) * channels + channel, mask=seen, other=0).to(tl.float32)
        target = ((sample * height + line) * width + step).to(tl.int64) * columns + column
        tl.store(out + target, value * a + b, mask=inside)


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
    """(R, B, C, H, W): images (N, H, W, C) of uint8 by number (G, B), moved down and right, flipped, times scale plus
    offset per channel; `group` (R,) says whose draw each row takes."""
    _, height, width, channels = images.shape
    batch, columns = chosen.shape[1], len(group) * channels
    out = torch.empty(batch, height, width, len(group), channels, device=images.device, dtype=dtype)
    block = triton.next_power_of_2(columns)
    _draw_kernel[(batch * height,)](
        images, chosen, *moves, group, scale, offset, out, batch, height, width, shift, channels, columns, block
    )
    return out.permute(3, 0, 4, 1, 2)
