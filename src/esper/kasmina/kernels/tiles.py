"""Parts of the CUDA kernels that run seeds: tiles of images, convolutions of a tile, sums over pixels and groups.

A tile is a matrix (cells, channels) of some pixels of some samples of one row. Streams are stored as (batch, height,
width, rows, channels), main rows and shadow rows apart; what stages pass on as (entries, batch, pixels, channels).
"""

import triton
import triton.language as tl

from esper.leyline import BLEND_STYLES

MULTIPLY = tl.constexpr(BLEND_STYLES.index("multiply"))


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def row_start(main, shadow, row, main_rows, shadow_rows, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Where a row's images begin, and how far apart its pixels are."""
    if row < main_rows:
        base = main + row * CHANNELS
        stride = row * 0 + main_rows * CHANNELS
    else:
        base = shadow + (row - main_rows) * CHANNELS
        stride = row * 0 + shadow_rows * CHANNELS
    return base, stride


@triton.jit  # type: ignore[untyped-decorator]
def tile_cells(first, end, start, pixels, SAMPLES: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Sample and pixel of each cell of a tile, and whether it exists. Samples are counted from the first one."""
    cell = tl.arange(0, SAMPLES * WIDE)
    sample = cell // WIDE
    pixel = start + cell % WIDE
    return sample, pixel, (first + sample < end) & (pixel < pixels)


@triton.jit
def offsets_of(sample, pixel, pixels, stride):  # type: ignore[no-untyped-def]
    """Offsets of these pixels from the first one of the tile's first sample: 32 bits hold them."""
    return ((sample * pixels + pixel) * stride).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def load_cells(base, offsets, seen, channel, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """(cells, channels); 0 where there is nothing."""
    mask = seen[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(base + offsets[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_cells(base, offsets, seen, channel, value, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    mask = seen[:, None] & (channel < CHANNELS)[None, :]
    tl.store(base + offsets[:, None] + channel[None, :], value, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def convolve(  # type: ignore[no-untyped-def]
    base, stride, weight, sample, pixel, seen, height, width,
    FROM: tl.constexpr, TO: tl.constexpr, SIDE: tl.constexpr, DEPTHWISE: tl.constexpr, TURNED: tl.constexpr,  # noqa: N803
    FROM_WIDE: tl.constexpr, TO_WIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """(cells, TO) in float32, from FROM channels; TURNED is the transposed convolution. SIDE 0: what is read."""
    source = tl.arange(0, FROM_WIDE)
    target = tl.arange(0, TO_WIDE)
    pixels = height * width
    if SIDE == 0:
        return load_cells(base, offsets_of(sample, pixel, pixels, stride), seen, source, FROM).to(tl.float32)
    result = tl.zeros((sample.shape[0], TO_WIDE), tl.float32)
    for tap in range(SIDE * SIDE):
        down = tap // SIDE - SIDE // 2
        right = tap % SIDE - SIDE // 2
        if TURNED:
            down = -down
            right = -right
        y = pixel // width + down
        x = pixel % width + right
        inside = seen & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        value = load_cells(base, offsets_of(sample, y * width + x, pixels, stride), inside, source, FROM)
        if DEPTHWISE:
            kernel = tl.load(weight + source * (SIDE * SIDE) + tap, mask=source < FROM, other=0.0)
            result += value.to(tl.float32) * kernel[None, :]
        else:
            if TURNED:  # noqa: SIM108
                index = source[:, None] * TO + target[None, :]
            else:
                index = target[None, :] * FROM + source[:, None]
            mask = (source < FROM)[:, None] & (target < TO)[None, :]
            kernel = tl.load(weight + index * (SIDE * SIDE) + tap, mask=mask, other=0.0).to(value.dtype)
            result = tl.dot(value, kernel, result, input_precision="ieee")
    return result


@triton.jit  # type: ignore[untyped-decorator]
def over_pixels(x, SAMPLES: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """(cells, channels) → (samples, channels)."""
    return tl.sum(tl.reshape(x, (SAMPLES, WIDE, x.shape[1])), 1)


@triton.jit  # type: ignore[untyped-decorator]
def over_group(x, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """(samples, channels): each channel's sum over its group of neighbours."""
    groups: tl.constexpr = x.shape[1] // GROUP
    sums = tl.sum(tl.reshape(x, (x.shape[0], groups, GROUP)), 2)
    return tl.reshape(tl.broadcast_to(sums[:, :, None], (x.shape[0], groups, GROUP)), (x.shape[0], groups * GROUP))


@triton.jit  # type: ignore[untyped-decorator]
def spread_out(x, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """(samples, channels) → (cells, channels)."""
    wide = tl.broadcast_to(x[:, None, :], (x.shape[0], WIDE, x.shape[1]))
    return tl.reshape(wide, (x.shape[0] * WIDE, x.shape[1]))


@triton.jit  # type: ignore[untyped-decorator]
def vector(start, channel, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A parameter per channel, (1, channels)."""
    return tl.load(start + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]


@triton.jit
def samples_of(valid, entry, per, batch):  # type: ignore[no-untyped-def]
    """The range of samples of this program; empty for padding."""
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, batch)
    return begin, tl.where(tl.load(valid + entry) != 0, end, begin)


@triton.jit
def share_of(sums, entry, parameters):  # type: ignore[no-untyped-def]
    """Where a program leaves its sums for the weights (entries, splits, parameters)."""
    return sums + (entry * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * parameters


@triton.jit  # type: ignore[untyped-decorator]
def statistics_at(stats, entry, batch, first, end, channel, OUTPUTS: tl.constexpr, SAMPLES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Where the means of some samples lie (entries, batch, 2, channels), with 1/√(var + ε) behind them; what exists."""
    inner = first + tl.arange(0, SAMPLES)
    index = ((entry * batch + inner) * 2 * OUTPUTS)[:, None] + channel[None, :]
    return stats + index, (inner < end)[:, None] & (channel < OUTPUTS)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def stage_source(main, shadow, source, row, here, main_rows, shadow_rows, INPUTS: tl.constexpr, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Where a stage reads: the row of the stream, or what the stage before left."""
    if FIRST:
        base, stride = row_start(main, shadow, row, main_rows, shadow_rows, INPUTS)
    else:
        base, stride = source + here * INPUTS, here * 0 + INPUTS
    return base, stride
