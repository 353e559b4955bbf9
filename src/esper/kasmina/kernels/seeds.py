"""CUDA kernels that run a stage of all seeds of a bank at once.

A stage of entry e, whose member has kernel W, norm γ and β, and scale a, computes for every sample

    y = W ∗ x,   n = γ·(y − mean)/√(var + ε) + β,   z = max(n, 0)        (each part may be missing)

The first stage reads the entry's row of the stream h. The last one writes h + s·a·z there, or h + s·h·tanh(a·z), where
s is the strength. Stages pass z on in a scratch (entries, batch, pixels, channels). Means are over a sample, so a
program takes some samples of one entry, and no two programs write to one place. Padding costs nothing: its programs
have no samples.

Backwards, one kernel per stage reads the gradient of what follows, and writes ∂L/∂y. Weights get their gradient in two
steps: each program sums over its own samples, then `_sum_splits` over the programs, always in the same order.

Streams are stored as (batch, height, width, rows, channels), main rows and shadow rows apart. The same seeds in plain
torch are the blueprints themselves.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from esper.leyline import BLEND_STYLES

MULTIPLY = tl.constexpr(BLEND_STYLES.index("multiply"))


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _row(main, shadow, row, main_rows, shadow_rows, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Where a row's images begin, and how far apart its pixels are."""
    if row < main_rows:
        base = main + row * CHANNELS
        stride = row * 0 + main_rows * CHANNELS
    else:
        base = shadow + (row - main_rows) * CHANNELS
        stride = row * 0 + shadow_rows * CHANNELS
    return base, stride


@triton.jit  # type: ignore[untyped-decorator]
def _cells(first, end, start, pixels, SAMPLES: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Sample and pixel of each cell of a tile, and whether it exists. Samples are counted from the first one."""
    cell = tl.arange(0, SAMPLES * WIDE)
    sample = cell // WIDE
    pixel = start + cell % WIDE
    return sample, pixel, (first + sample < end) & (pixel < pixels)


@triton.jit
def _at(sample, pixel, pixels, stride):  # type: ignore[no-untyped-def]
    """Offsets of these pixels from the first one of the tile's first sample: 32 bits hold them."""
    return ((sample * pixels + pixel) * stride).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _read(base, offsets, seen, channel, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """(cells, channels); 0 where there is nothing."""
    mask = seen[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(base + offsets[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _write(base, offsets, seen, channel, value, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    mask = seen[:, None] & (channel < CHANNELS)[None, :]
    tl.store(base + offsets[:, None] + channel[None, :], value, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    base, stride, weight, sample, pixel, seen, height, width,
    FROM: tl.constexpr, TO: tl.constexpr, SIDE: tl.constexpr, DEPTHWISE: tl.constexpr, TURNED: tl.constexpr,  # noqa: N803
    FROM_WIDE: tl.constexpr, TO_WIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """(cells, TO) in float32, from FROM channels; TURNED is the transposed convolution. SIDE 0: what is read."""
    source = tl.arange(0, FROM_WIDE)
    target = tl.arange(0, TO_WIDE)
    pixels = height * width
    if SIDE == 0:
        return _read(base, _at(sample, pixel, pixels, stride), seen, source, FROM).to(tl.float32)
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
        value = _read(base, _at(sample, y * width + x, pixels, stride), inside, source, FROM)
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
def _over_pixels(x, SAMPLES: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """(cells, channels) → (samples, channels)."""
    return tl.sum(tl.reshape(x, (SAMPLES, WIDE, x.shape[1])), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _over_group(x, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """(samples, channels): each channel's sum over its group of neighbours."""
    groups: tl.constexpr = x.shape[1] // GROUP
    sums = tl.sum(tl.reshape(x, (x.shape[0], groups, GROUP)), 2)
    return tl.reshape(tl.broadcast_to(sums[:, :, None], (x.shape[0], groups, GROUP)), (x.shape[0], groups * GROUP))


@triton.jit  # type: ignore[untyped-decorator]
def _spread(x, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """(samples, channels) → (cells, channels)."""
    wide = tl.broadcast_to(x[:, None, :], (x.shape[0], WIDE, x.shape[1]))
    return tl.reshape(wide, (x.shape[0] * WIDE, x.shape[1]))


@triton.jit  # type: ignore[untyped-decorator]
def _vector(start, channel, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A parameter per channel, (1, channels)."""
    return tl.load(start + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _samples_of(valid, entry, per, batch):  # type: ignore[no-untyped-def]
    """The range of samples of this program; empty for padding."""
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, batch)
    return begin, tl.where(tl.load(valid + entry) != 0, end, begin)


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    read, stride, weight, first, end, height, width, eps,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SIDE: tl.constexpr, DEPTHWISE: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    GROUP_WIDE: tl.constexpr, SAMPLES: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr,  # noqa: N803
    IN: tl.constexpr, OUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """y of the last tile; mean and 1/√(var + ε) of the group of each channel (samples, channels), joined over tiles."""
    pixels = height * width
    real = (tl.arange(0, OUT) < OUTPUTS)[None, :]
    mean = tl.zeros((SAMPLES, OUT), tl.float32)
    square = tl.zeros((SAMPLES, OUT), tl.float32)
    y = tl.zeros((SAMPLES * WIDE, OUT), tl.float32)
    for tile in range(TILES):
        sample, pixel, seen = _cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
        y = _convolve(
            read, stride, weight, sample, pixel, seen, height, width,
            INPUTS, OUTPUTS, SIDE, DEPTHWISE, False, IN, OUT,
        )  # fmt: skip
        before = tile * WIDE * GROUP
        count = tl.minimum(WIDE, pixels - tile * WIDE) * GROUP
        middle = _over_group(_over_pixels(y, SAMPLES, WIDE), GROUP_WIDE) / count
        away = tl.where(seen[:, None] & real, y - _spread(middle, WIDE), 0.0)
        away = _over_group(_over_pixels(away * away, SAMPLES, WIDE), GROUP_WIDE)
        change = middle - mean
        share = count / (before + count)
        mean += change * share
        square += away + change * change * (before * share)
    return y, mean, 1.0 / tl.sqrt(square / (pixels * GROUP) + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _source(main, shadow, source, row, here, main_rows, shadow_rows, INPUTS: tl.constexpr, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Where a stage reads: the row of the stream, or what the stage before left."""
    if FIRST:
        base, stride = _row(main, shadow, row, main_rows, shadow_rows, INPUTS)
    else:
        base, stride = source + here * INPUTS, here * 0 + INPUTS
    return base, stride


@triton.jit  # type: ignore[untyped-decorator]
def _keep(stats, entry, batch, first, end, mean, rate, OUTPUTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Store the statistics of some samples (entries, batch, 2, channels)."""
    inner = first + tl.arange(0, mean.shape[0])
    channel = tl.arange(0, mean.shape[1])
    index = ((entry * batch + inner) * 2 * OUTPUTS)[:, None] + channel[None, :]
    known = (inner < end)[:, None] & (channel < OUTPUTS)[None, :]
    tl.store(stats + index, mean, mask=known)
    tl.store(stats + index + OUTPUTS, rate, mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _finished(  # type: ignore[no-untyped-def]
    y, x, mean, rate, gamma, beta,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, RELU: tl.constexpr, LESS: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """z from y, and from the input x where it is subtracted."""
    channel = tl.arange(0, y.shape[1])
    z = y
    if GROUP > 0:
        normal = (y - _spread(mean, WIDE)) * _spread(rate, WIDE)
        z = normal * _vector(gamma, channel, OUTPUTS) + _vector(beta, channel, OUTPUTS)
    if LESS:
        z = z - x
    if RELU:
        z = tl.where(z < 0, 0.0, z)  # a NaN stays
    return z


@triton.jit  # type: ignore[untyped-decorator]
def _blended(x, delta, factor, kind, MULTIPLIES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The stream with the effect of a seed."""
    if MULTIPLIES:
        delta = tl.where(kind == MULTIPLY, x * libdevice.tanh(delta), delta)
    return x + factor * delta


@triton.jit(do_not_specialize=["main_rows", "shadow_rows"])  # type: ignore[untyped-decorator]
def stage_forward(  # type: ignore[no-untyped-def]
    main, shadow, to_main, to_shadow, source, kept, out, stats, sums, matrix,
    rows, members, strength, style, valid,
    main_rows, shadow_rows, batch, per, height, width, parameters, weight, gamma, beta, scale, eps,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SIDE: tl.constexpr, DEPTHWISE: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    GROUP_WIDE: tl.constexpr, RELU: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, LESS: tl.constexpr,  # noqa: N803
    MULTIPLIES: tl.constexpr, KEEPS: tl.constexpr, PROBES: tl.constexpr, SAMPLES: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Some samples of one entry per program. KEEPS y and the statistics of the norm for the backward pass.

    PROBES: `to_main` is the gradient of the stream, and instead of acting the last stage leaves Σ z·∂L/∂h per channel
    in `sums` (entries, splits, channels), the gradient that a scale of zero would have.
    """
    entry = tl.program_id(1)
    begin, end = _samples_of(valid, entry, per, batch)
    row = tl.load(rows + entry)
    own = matrix + tl.load(members + entry) * parameters
    channel = tl.arange(0, OUT)
    pixels = height * width
    here = entry.to(tl.int64) * batch * pixels
    base, stride = _source(main, shadow, source, row, here, main_rows, shadow_rows, INPUTS, FIRST)
    stream, apart = _row(main, shadow, row, main_rows, shadow_rows, OUTPUTS)
    target, apart = _row(to_main, to_shadow, row, main_rows, shadow_rows, OUTPUTS)
    factor = tl.load(strength + entry).to(tl.float32)
    kind = tl.load(style + tl.load(members + entry))
    worth = tl.zeros((OUT,), tl.float32)
    for first in range(begin, end, SAMPLES):
        start = first * pixels
        read = base + start * stride
        y = tl.zeros((SAMPLES * WIDE, OUT), tl.float32)
        x = y
        mean = tl.zeros((SAMPLES, OUT), tl.float32)
        rate = mean
        if GROUP > 0:
            y, mean, rate = _statistics(
                read, stride, own + weight, first, end, height, width, eps,
                INPUTS, OUTPUTS, SIDE, DEPTHWISE, GROUP, GROUP_WIDE, SAMPLES, WIDE, TILES, IN, OUT,
            )  # fmt: skip
            if KEEPS:
                _keep(stats, entry, batch, first, end, mean, rate, OUTPUTS)
        for tile in range(TILES):
            sample, pixel, seen = _cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
            local = _at(sample, pixel, pixels, OUTPUTS)
            offsets = _at(sample, pixel, pixels, apart)
            if TILES > 1 or GROUP == 0:
                y = _convolve(
                    read, stride, own + weight, sample, pixel, seen, height, width,
                    INPUTS, OUTPUTS, SIDE, DEPTHWISE, False, IN, OUT,
                )  # fmt: skip
            if KEEPS:
                _write(kept + (here + start) * OUTPUTS, local, seen, channel, y, OUTPUTS)
            if LAST:
                x = _read(stream + start * apart, offsets, seen, channel, OUTPUTS).to(tl.float32)
            z = _finished(y, x, mean, rate, own + gamma, own + beta, OUTPUTS, GROUP, RELU, LESS, WIDE)
            if PROBES:
                worth += tl.sum(z * _read(target + start * apart, offsets, seen, channel, OUTPUTS).to(tl.float32), 0)
            elif LAST:
                changed = _blended(x, z * _vector(own + scale, channel, OUTPUTS), factor, kind, MULTIPLIES)
                _write(target + start * apart, offsets, seen, channel, changed, OUTPUTS)
            else:
                _write(out + (here + start) * OUTPUTS, local, seen, channel, z, OUTPUTS)
    if PROBES:
        split = (entry * tl.num_programs(0) + tl.program_id(0)) * OUTPUTS
        tl.store(sums + split + channel, worth, mask=channel < OUTPUTS)


@triton.jit  # type: ignore[untyped-decorator]
def _incoming(  # type: ignore[no-untyped-def]
    stream, apart, gradient, following, next_weight, kept, own, mean, rate, factor, kind,
    sample, pixel, seen, height, width, gamma, beta, scale,
    OUTPUTS: tl.constexpr, NEXT: tl.constexpr, NEXT_SIDE: tl.constexpr, NEXT_DEPTHWISE: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, RELU: tl.constexpr, LAST: tl.constexpr, LESS: tl.constexpr, MULTIPLIES: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr, OUT: tl.constexpr, NEXT_WIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """∂L/∂n of a tile; the normalised y; z·∂L/∂(a·z), whose sum is the gradient of the scale; and what `multiply` sends
    past the seed to the stream."""
    channel = tl.arange(0, OUT)
    pixels = height * width
    n = tl.zeros((sample.shape[0], OUT), tl.float32)
    normal = n
    weighted = n
    past = n
    if GROUP > 0 or RELU or LAST:
        n = _read(kept, _at(sample, pixel, pixels, OUTPUTS), seen, channel, OUTPUTS).to(tl.float32)
    if GROUP > 0:
        normal = (n - _spread(mean, WIDE)) * _spread(rate, WIDE)
        normal = tl.where(seen[:, None] & (channel < OUTPUTS)[None, :], normal, 0.0)
        n = normal * _vector(own + gamma, channel, OUTPUTS) + _vector(own + beta, channel, OUTPUTS)
    if LAST:
        d = _read(gradient, _at(sample, pixel, pixels, apart), seen, channel, OUTPUTS).to(tl.float32) * factor
        z = n
        if LESS or MULTIPLIES:
            x = _read(stream, _at(sample, pixel, pixels, apart), seen, channel, OUTPUTS).to(tl.float32)
        if LESS:
            z = z - x
        if RELU:
            z = tl.where(z < 0, 0.0, z)
        size = _vector(own + scale, channel, OUTPUTS)
        if MULTIPLIES:
            t = libdevice.tanh(z * size)
            past = tl.where(kind == MULTIPLY, d * t, 0.0)
            d = tl.where(kind == MULTIPLY, d * x * (1.0 - t * t), d)
        weighted = d * z
        d = d * size
    else:
        d = _convolve(
            following, NEXT, next_weight, sample, pixel, seen, height, width,
            NEXT, OUTPUTS, NEXT_SIDE, NEXT_DEPTHWISE, True, NEXT_WIDE, OUT,
        )  # fmt: skip
    if RELU:
        d = tl.where(n <= 0, 0.0, d)
    return d, normal, weighted, past


@triton.jit  # type: ignore[untyped-decorator]
def _through_norm(  # type: ignore[no-untyped-def]
    d, normal, factors, level, slope, rate, GROUP: tl.constexpr, LESS: tl.constexpr, WIDE: tl.constexpr  # noqa: N803
):  # fmt: skip
    """∂L/∂y from d = ∂L/∂n: (γ·d − mean(γ·d) − ŷ·mean(γ·d·ŷ))/√(var + ε); less d where the input was subtracted."""
    result = d
    if GROUP > 0:
        result = (factors * d - _spread(level, WIDE) - normal * _spread(slope, WIDE)) * _spread(rate, WIDE)
    if LESS:
        result = result - d
    return result


@triton.jit(do_not_specialize=["main_rows", "shadow_rows"])  # type: ignore[untyped-decorator]
def stage_backward(  # type: ignore[no-untyped-def]
    main, shadow, from_main, from_shadow, to_main, to_shadow, following, kept, stats, matrix, out, sums,
    rows, members, strength, style, valid,
    main_rows, shadow_rows, batch, per, height, width, parameters, next_weight, gamma, beta, scale,
    OUTPUTS: tl.constexpr, NEXT: tl.constexpr, NEXT_SIDE: tl.constexpr, NEXT_DEPTHWISE: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, GROUP_WIDE: tl.constexpr, RELU: tl.constexpr, LAST: tl.constexpr, LESS: tl.constexpr,  # noqa: N803
    MULTIPLIES: tl.constexpr, TO_STREAM: tl.constexpr, SAMPLES: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr, OUT: tl.constexpr, NEXT_WIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """∂L/∂y of a stage: from the stream if it is the LAST one, else from ∂L/∂y of the stage that follows.

    TO_STREAM: the result is added to the gradient of the stream. So a stage without anything is the gradient that the
    first convolution sends there. Sums for γ, β and the scale are left in `sums` (entries, splits, parameters).
    """
    entry = tl.program_id(1)
    begin, end = _samples_of(valid, entry, per, batch)
    row = tl.load(rows + entry)
    own = matrix + tl.load(members + entry) * parameters
    channel = tl.arange(0, OUT)
    pixels = height * width
    here = entry.to(tl.int64) * batch * pixels
    stream, apart = _row(main, shadow, row, main_rows, shadow_rows, OUTPUTS)
    gradient, apart = _row(from_main, from_shadow, row, main_rows, shadow_rows, OUTPUTS)
    target, apart = _row(to_main, to_shadow, row, main_rows, shadow_rows, OUTPUTS)
    factor = tl.load(strength + entry).to(tl.float32)
    kind = tl.load(style + tl.load(members + entry))
    to_gamma = tl.zeros((OUT,), tl.float32)
    to_beta = tl.zeros((OUT,), tl.float32)
    to_scale = tl.zeros((OUT,), tl.float32)
    for first in range(begin, end, SAMPLES):
        start = first * pixels
        mean = tl.zeros((SAMPLES, OUT), tl.float32)
        rate = tl.zeros((SAMPLES, OUT), tl.float32)
        if GROUP > 0:
            inner = first + tl.arange(0, SAMPLES)
            index = ((entry * batch + inner) * 2 * OUTPUTS)[:, None] + channel[None, :]
            known = (inner < end)[:, None] & (channel < OUTPUTS)[None, :]
            mean = tl.load(stats + index, mask=known, other=0.0)
            rate = tl.load(stats + index + OUTPUTS, mask=known, other=0.0)
        plain = tl.zeros((SAMPLES, OUT), tl.float32)
        along = tl.zeros((SAMPLES, OUT), tl.float32)
        d = tl.zeros((SAMPLES * WIDE, OUT), tl.float32)
        normal = tl.zeros((SAMPLES * WIDE, OUT), tl.float32)
        past = tl.zeros((SAMPLES * WIDE, OUT), tl.float32)
        weighted = past
        if GROUP > 0 or LAST:
            for tile in range(TILES):
                sample, pixel, seen = _cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
                d, normal, weighted, past = _incoming(
                    stream + start * apart, apart, gradient + start * apart, following + (here + start) * NEXT,
                    own + next_weight, kept + (here + start) * OUTPUTS, own, mean, rate, factor, kind,
                    sample, pixel, seen, height, width, gamma, beta, scale,
                    OUTPUTS, NEXT, NEXT_SIDE, NEXT_DEPTHWISE, GROUP, RELU, LAST, LESS, MULTIPLIES, WIDE, OUT, NEXT_WIDE,
                )  # fmt: skip
                plain += _over_pixels(d, SAMPLES, WIDE)
                along += _over_pixels(d * normal, SAMPLES, WIDE)
                to_scale += tl.sum(weighted, 0)
            to_beta += tl.sum(plain, 0)
            to_gamma += tl.sum(along, 0)
        factors = _vector(own + gamma, channel, OUTPUTS)
        level = plain
        slope = along
        if GROUP > 0:
            level = _over_group(factors * plain, GROUP_WIDE) / (pixels * GROUP)
            slope = _over_group(factors * along, GROUP_WIDE) / (pixels * GROUP)
        for tile in range(TILES):
            sample, pixel, seen = _cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
            if TILES > 1 or (GROUP == 0 and not LAST):
                d, normal, weighted, past = _incoming(
                    stream + start * apart, apart, gradient + start * apart, following + (here + start) * NEXT,
                    own + next_weight, kept + (here + start) * OUTPUTS, own, mean, rate, factor, kind,
                    sample, pixel, seen, height, width, gamma, beta, scale,
                    OUTPUTS, NEXT, NEXT_SIDE, NEXT_DEPTHWISE, GROUP, RELU, LAST, LESS, MULTIPLIES, WIDE, OUT, NEXT_WIDE,
                )  # fmt: skip
            result = _through_norm(d, normal, factors, level, slope, rate, GROUP, LESS, WIDE)
            offsets = _at(sample, pixel, pixels, apart)
            if TO_STREAM:
                past += result
            else:
                local = _at(sample, pixel, pixels, OUTPUTS)
                _write(out + (here + start) * OUTPUTS, local, seen, channel, result, OUTPUTS)
            if TO_STREAM or MULTIPLIES:
                past += _read(target + start * apart, offsets, seen, channel, OUTPUTS).to(tl.float32)
                _write(target + start * apart, offsets, seen, channel, past, OUTPUTS)
    share = sums + (entry * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * parameters
    if GROUP > 0:
        tl.store(share + gamma + channel, to_gamma, mask=channel < OUTPUTS)
        tl.store(share + beta + channel, to_beta, mask=channel < OUTPUTS)
    if LAST:
        tl.store(share + scale + channel, to_scale, mask=channel < OUTPUTS)


@triton.jit(do_not_specialize=["main_rows", "shadow_rows"])  # type: ignore[untyped-decorator]
def kernel_gradient(  # type: ignore[no-untyped-def]
    main, shadow, source, following, sums, rows, learns,
    main_rows, shadow_rows, batch, per, height, width, parameters, weight,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SIDE: tl.constexpr, DEPTHWISE: tl.constexpr, FIRST: tl.constexpr,  # noqa: N803
    SAMPLES: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One tap of the kernel per program: Σ x·∂L/∂y over its samples, x being the pixel under the tap."""
    entry, tap = tl.program_id(1), tl.program_id(2)
    begin, end = _samples_of(learns, entry, per, batch)
    pixels = height * width
    here = entry.to(tl.int64) * batch * pixels
    row = tl.load(rows + entry)
    base, stride = _source(main, shadow, source, row, here, main_rows, shadow_rows, INPUTS, FIRST)
    read = tl.arange(0, IN)
    made = tl.arange(0, OUT)
    total = tl.zeros((IN, OUT), tl.float32)
    alone = tl.zeros((OUT,), tl.float32)
    for first in range(begin, end, SAMPLES):
        start = first * pixels
        for tile in range(TILES):
            sample, pixel, seen = _cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
            y = pixel // width + (tap // SIDE - SIDE // 2)
            x = pixel % width + (tap % SIDE - SIDE // 2)
            inside = seen & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            value = _read(base + start * stride, _at(sample, y * width + x, pixels, stride), inside, read, INPUTS)
            local = _at(sample, pixel, pixels, OUTPUTS)
            d = _read(following + (here + start) * OUTPUTS, local, seen, made, OUTPUTS)
            if DEPTHWISE:
                alone += tl.sum(value.to(tl.float32) * d.to(tl.float32), 0)
            else:
                total = tl.dot(tl.trans(value), d, total, input_precision="ieee")
    share = sums + (entry * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * parameters + weight + tap
    if DEPTHWISE:
        tl.store(share + made * (SIDE * SIDE), alone, mask=made < OUTPUTS)
    else:
        index = made[None, :] * INPUTS + read[:, None]
        mask = (read < INPUTS)[:, None] & (made < OUTPUTS)[None, :]
        tl.store(share + index * (SIDE * SIDE), total, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def sum_splits(sums, gradient, members, learns, splits, parameters, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The gradient (members, parameters) of those that learn: the sum over the programs of their entry."""
    entry = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < columns) & (tl.load(learns + entry) != 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        start = (entry * splits + split).to(tl.int64) * parameters
        total += tl.load(sums + start + column, mask=inside, other=0.0)
    tl.store(gradient + tl.load(members + entry) * parameters + column, total, mask=inside)
