"""CUDA kernels of squeeze-excite seeds: all seeds of a bank, forward and backward in one kernel each.

With m the mean of h over the pixels of a sample:

    p = W₁ m,   u = p·σ(p),   f = tanh(W₂ u),   z = h·f

The result is h + s·a·z, or h + s·h·tanh(a·z), where s is the strength and a the scale. A program takes some samples of
one entry. See `tiles` for the layout; in plain torch this is `SqueezeExcite`.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from esper.kasmina.kernels.launching import kernel
from esper.kasmina.kernels.tiles import (
    MULTIPLY,
    load_cells,
    offsets_of,
    row_start,
    samples_of,
    share_of,
    store_cells,
    vector,
)


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _factors(  # type: ignore[no-untyped-def]
    stream, apart, pixels, first, second,
    CHANNELS: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, ACROSS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """m, p, u and f of one sample."""
    channel = tl.arange(0, ACROSS)
    m = tl.zeros((ACROSS,), tl.float32)
    for tile in range(TILES):
        pixel = tile * WIDE + tl.arange(0, WIDE)
        seen = pixel < pixels
        m += tl.sum(load_cells(stream, offsets_of(0, pixel, pixels, apart), seen, channel, CHANNELS).to(tl.float32), 0)
    m = m / pixels
    p = tl.sum(first * m[None, :], 1)
    u = p * tl.sigmoid(p)
    f = libdevice.tanh(tl.sum(second * u[None, :], 1))
    return m, p, u, f


@triton.jit  # type: ignore[untyped-decorator]
def _matrices(  # type: ignore[no-untyped-def]
    own, squeeze, excite,
    CHANNELS: tl.constexpr, HIDDEN: tl.constexpr, ACROSS: tl.constexpr, INNER: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """W₁ (hidden, channels), W₂ (channels, hidden), and the columns of their entries with what exists of them."""
    channel = tl.arange(0, ACROSS)
    hidden = tl.arange(0, INNER)
    in_first = (hidden < HIDDEN)[:, None] & (channel < CHANNELS)[None, :]
    in_second = (channel < CHANNELS)[:, None] & (hidden < HIDDEN)[None, :]
    to_first = squeeze + hidden[:, None] * CHANNELS + channel[None, :]
    to_second = excite + channel[:, None] * HIDDEN + hidden[None, :]
    first = tl.load(own + to_first, mask=in_first, other=0.0).to(tl.float32)
    second = tl.load(own + to_second, mask=in_second, other=0.0).to(tl.float32)
    return first, second, to_first, to_second, in_first, in_second


@kernel
def squeeze_forward(  # type: ignore[no-untyped-def]
    main, shadow, to_main, to_shadow, sums, matrix, rows, members, strength, style, valid,
    main_rows, shadow_rows, batch, per, pixels, parameters, squeeze, excite, scale,
    CHANNELS: tl.constexpr, HIDDEN: tl.constexpr, MULTIPLIES: tl.constexpr, PROBES: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr, TILES: tl.constexpr, ACROSS: tl.constexpr, INNER: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Some samples of one entry per program. PROBES as in `stage_forward`."""
    entry = tl.program_id(1)
    begin, end = samples_of(valid, entry, per, batch)
    own = matrix + tl.load(members + entry) * parameters
    row = tl.load(rows + entry)
    stream, apart = row_start(main, shadow, row, main_rows, shadow_rows, CHANNELS)
    target, apart = row_start(to_main, to_shadow, row, main_rows, shadow_rows, CHANNELS)
    factor = tl.load(strength + entry).to(tl.float32)
    kind = tl.load(style + tl.load(members + entry))
    channel = tl.arange(0, ACROSS)
    first, second, to_first, to_second, in_first, in_second = _matrices(  # noqa: RUF059
        own, squeeze, excite, CHANNELS, HIDDEN, ACROSS, INNER
    )
    size = vector(own + scale, channel, CHANNELS)
    worth = tl.zeros((ACROSS,), tl.float32)
    for sample in range(begin, end):
        start = sample * pixels * apart
        read = stream + start
        m, p, u, f = _factors(  # noqa: RUF059
            read, apart, pixels, first, second, CHANNELS, WIDE, TILES, ACROSS
        )
        for tile in range(TILES):
            pixel = tile * WIDE + tl.arange(0, WIDE)
            seen = pixel < pixels
            offsets = offsets_of(0, pixel, pixels, apart)
            x = load_cells(read, offsets, seen, channel, CHANNELS).to(tl.float32)
            delta = x * f[None, :]
            if PROBES:
                worth += tl.sum(delta * load_cells(target + start, offsets, seen, channel, CHANNELS).to(tl.float32), 0)
            else:
                delta = delta * size
                if MULTIPLIES:
                    delta = tl.where(kind == MULTIPLY, x * libdevice.tanh(delta), delta)
                store_cells(target + start, offsets, seen, channel, x + factor * delta, CHANNELS)
    if PROBES:
        split = (entry * tl.num_programs(0) + tl.program_id(0)) * CHANNELS
        tl.store(sums + split + channel, worth, mask=channel < CHANNELS)


@kernel
def squeeze_backward(  # type: ignore[no-untyped-def]
    main, shadow, from_main, from_shadow, to_main, to_shadow, matrix, sums, rows, members, strength, style, valid,
    main_rows, shadow_rows, batch, per, pixels, parameters, squeeze, excite, scale,
    CHANNELS: tl.constexpr, HIDDEN: tl.constexpr, MULTIPLIES: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr,  # noqa: N803
    ACROSS: tl.constexpr, INNER: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Adds to the gradient of the stream, and leaves sums for the weights in `sums` (entries, splits, parameters)."""
    entry = tl.program_id(1)
    begin, end = samples_of(valid, entry, per, batch)
    own = matrix + tl.load(members + entry) * parameters
    row = tl.load(rows + entry)
    stream, apart = row_start(main, shadow, row, main_rows, shadow_rows, CHANNELS)
    gradient, apart = row_start(from_main, from_shadow, row, main_rows, shadow_rows, CHANNELS)
    target, apart = row_start(to_main, to_shadow, row, main_rows, shadow_rows, CHANNELS)
    factor = tl.load(strength + entry).to(tl.float32)
    kind = tl.load(style + tl.load(members + entry))
    channel = tl.arange(0, ACROSS)
    first, second, to_first, to_second, in_first, in_second = _matrices(
        own, squeeze, excite, CHANNELS, HIDDEN, ACROSS, INNER
    )
    size = vector(own + scale, channel, CHANNELS)
    d_first = tl.zeros((INNER, ACROSS), tl.float32)
    d_second = tl.zeros((ACROSS, INNER), tl.float32)
    d_scale = tl.zeros((ACROSS,), tl.float32)
    for sample in range(begin, end):
        start = sample * pixels * apart
        read = stream + start
        m, p, u, f = _factors(read, apart, pixels, first, second, CHANNELS, WIDE, TILES, ACROSS)
        to_f = tl.zeros((ACROSS,), tl.float32)
        for tile in range(TILES):
            pixel = tile * WIDE + tl.arange(0, WIDE)
            seen = pixel < pixels
            offsets = offsets_of(0, pixel, pixels, apart)
            x = load_cells(read, offsets, seen, channel, CHANNELS).to(tl.float32)
            d = factor * load_cells(gradient + start, offsets, seen, channel, CHANNELS).to(tl.float32)
            if MULTIPLIES:
                t = libdevice.tanh(x * f[None, :] * size)
                d = tl.where(kind == MULTIPLY, d * x * (1.0 - t * t), d)
            d_scale += tl.sum(d * x * f[None, :], 0)
            to_f += tl.sum(d * x * size, 0)
        to_v = to_f * (1.0 - f * f)
        d_second += to_v[:, None] * u[None, :]
        to_u = tl.sum(second * to_v[:, None], 0)
        open_ = tl.sigmoid(p)
        to_p = to_u * open_ * (1.0 + p * (1.0 - open_))
        d_first += to_p[:, None] * m[None, :]
        to_m = tl.sum(first * to_p[:, None], 0) / pixels
        for tile in range(TILES):
            pixel = tile * WIDE + tl.arange(0, WIDE)
            seen = pixel < pixels
            offsets = offsets_of(0, pixel, pixels, apart)
            d = factor * load_cells(gradient + start, offsets, seen, channel, CHANNELS).to(tl.float32)
            result = load_cells(target + start, offsets, seen, channel, CHANNELS).to(tl.float32)
            if MULTIPLIES:
                x = load_cells(read, offsets, seen, channel, CHANNELS).to(tl.float32)
                t = libdevice.tanh(x * f[None, :] * size)
                result += tl.where(kind == MULTIPLY, d * t, 0.0)
                d = tl.where(kind == MULTIPLY, d * x * (1.0 - t * t), d)
            result += d * size * f[None, :] + to_m[None, :]
            store_cells(target + start, offsets, seen, channel, result, CHANNELS)
    share = share_of(sums, entry, parameters)
    tl.store(share + to_first, d_first, mask=in_first)
    tl.store(share + to_second, d_second, mask=in_second)
    tl.store(share + scale + channel, d_scale, mask=channel < CHANNELS)
