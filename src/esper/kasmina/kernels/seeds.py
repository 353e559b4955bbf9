"""CUDA kernels that run a stage of all seeds of a bank at once.

A stage of entry e, whose member has kernel W, norm γ and β, and scale a, computes for every sample

    y = W ∗ x,   n = γ·(y − mean)/√(var + ε) + β,   z = max(n, 0)        (each part may be missing)

The first stage reads the entry's row of the stream h. The last one writes h + s·a·z there, or h + s·h·tanh(a·z), where
s is the strength. Stages pass z on in a scratch (entries, batch, pixels, channels). Means are over a sample, so a
program takes some samples of one entry, and no two programs write to one place. Padding costs nothing: its programs
have no samples.

`tiles` says how images are stored. The same seeds in plain torch are the blueprints themselves.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from esper.kasmina.kernels.launching import kernel
from esper.kasmina.kernels.tiles import (
    MULTIPLY,
    convolve,
    load_cells,
    offsets_of,
    over_group,
    over_pixels,
    row_start,
    samples_of,
    spread_out,
    stage_source,
    statistics_at,
    store_cells,
    tile_cells,
    vector,
)


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
        sample, pixel, seen = tile_cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
        y = convolve(
            read, stride, weight, sample, pixel, seen, height, width,
            INPUTS, OUTPUTS, SIDE, DEPTHWISE, False, IN, OUT,
        )  # fmt: skip
        before = tile * WIDE * GROUP
        count = tl.minimum(WIDE, pixels - tile * WIDE) * GROUP
        middle = over_group(over_pixels(y, SAMPLES, WIDE), GROUP_WIDE) / count
        away = tl.where(seen[:, None] & real, y - spread_out(middle, WIDE), 0.0)
        away = over_group(over_pixels(away * away, SAMPLES, WIDE), GROUP_WIDE)
        change = middle - mean
        share = count / (before + count)
        mean += change * share
        square += away + change * change * (before * share)
    return y, mean, 1.0 / tl.sqrt(square / (pixels * GROUP) + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(stats, entry, batch, first, end, mean, rate, OUTPUTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Store the statistics of some samples."""
    place, known = statistics_at(stats, entry, batch, first, end, tl.arange(0, mean.shape[1]), OUTPUTS, mean.shape[0])
    tl.store(place, mean, mask=known)
    tl.store(place + OUTPUTS, rate, mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _finished(  # type: ignore[no-untyped-def]
    y, x, mean, rate, gamma, beta,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, RELU: tl.constexpr, LESS: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """z from y, and from the input x where it is subtracted."""
    channel = tl.arange(0, y.shape[1])
    z = y
    if GROUP > 0:
        normal = (y - spread_out(mean, WIDE)) * spread_out(rate, WIDE)
        z = normal * vector(gamma, channel, OUTPUTS) + vector(beta, channel, OUTPUTS)
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


@kernel
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
    begin, end = samples_of(valid, entry, per, batch)
    row = tl.load(rows + entry)
    own = matrix + tl.load(members + entry) * parameters
    channel = tl.arange(0, OUT)
    pixels = height * width
    here = entry.to(tl.int64) * batch * pixels
    base, stride = stage_source(main, shadow, source, row, here, main_rows, shadow_rows, INPUTS, FIRST)
    stream, apart = row_start(main, shadow, row, main_rows, shadow_rows, OUTPUTS)
    target, apart = row_start(to_main, to_shadow, row, main_rows, shadow_rows, OUTPUTS)
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
            sample, pixel, seen = tile_cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
            local = offsets_of(sample, pixel, pixels, OUTPUTS)
            offsets = offsets_of(sample, pixel, pixels, apart)
            if TILES > 1 or GROUP == 0:
                y = convolve(
                    read, stride, own + weight, sample, pixel, seen, height, width,
                    INPUTS, OUTPUTS, SIDE, DEPTHWISE, False, IN, OUT,
                )  # fmt: skip
            if KEEPS:
                store_cells(kept + (here + start) * OUTPUTS, local, seen, channel, y, OUTPUTS)
            if LAST:
                x = load_cells(stream + start * apart, offsets, seen, channel, OUTPUTS).to(tl.float32)
            z = _finished(y, x, mean, rate, own + gamma, own + beta, OUTPUTS, GROUP, RELU, LESS, WIDE)
            if PROBES:
                worth += tl.sum(
                    z * load_cells(target + start * apart, offsets, seen, channel, OUTPUTS).to(tl.float32), 0
                )
            elif LAST:
                changed = _blended(x, z * vector(own + scale, channel, OUTPUTS), factor, kind, MULTIPLIES)
                store_cells(target + start * apart, offsets, seen, channel, changed, OUTPUTS)
            else:
                store_cells(out + (here + start) * OUTPUTS, local, seen, channel, z, OUTPUTS)
    if PROBES:
        split = (entry * tl.num_programs(0) + tl.program_id(0)) * OUTPUTS
        tl.store(sums + split + channel, worth, mask=channel < OUTPUTS)
