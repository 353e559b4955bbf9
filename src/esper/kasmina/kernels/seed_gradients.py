"""CUDA kernels of the backward pass of seeds: the gradients of a stage, for all seeds of a bank at once.

`seeds` says what a stage computes. One kernel per stage reads the gradient of what follows, recomputes n and z from y,
and writes

    ∂L/∂y = (γ·d − mean(γ·d) − ŷ·mean(γ·d·ŷ))/√(var + ε),   d = ∂L/∂n,   ŷ = (y − mean)/√(var + ε)

The kernel W, γ, β and the scale get their gradients in two steps: each program sums over its own samples, then
`sum_splits` over the programs, always in the same order.
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
    share_of,
    spread_out,
    stage_source,
    statistics_at,
    store_cells,
    tile_cells,
    vector,
)


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
        n = load_cells(kept, offsets_of(sample, pixel, pixels, OUTPUTS), seen, channel, OUTPUTS).to(tl.float32)
    if GROUP > 0:
        normal = (n - spread_out(mean, WIDE)) * spread_out(rate, WIDE)
        normal = tl.where(seen[:, None] & (channel < OUTPUTS)[None, :], normal, 0.0)
        n = normal * vector(own + gamma, channel, OUTPUTS) + vector(own + beta, channel, OUTPUTS)
    if LAST:
        d = (
            load_cells(gradient, offsets_of(sample, pixel, pixels, apart), seen, channel, OUTPUTS).to(tl.float32)
            * factor
        )
        z = n
        if LESS or MULTIPLIES:
            x = load_cells(stream, offsets_of(sample, pixel, pixels, apart), seen, channel, OUTPUTS).to(tl.float32)
        if LESS:
            z = z - x
        if RELU:
            z = tl.where(z < 0, 0.0, z)
        size = vector(own + scale, channel, OUTPUTS)
        if MULTIPLIES:
            t = libdevice.tanh(z * size)
            past = tl.where(kind == MULTIPLY, d * t, 0.0)
            d = tl.where(kind == MULTIPLY, d * x * (1.0 - t * t), d)
        weighted = d * z
        d = d * size
    else:
        d = convolve(
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
        result = (factors * d - spread_out(level, WIDE) - normal * spread_out(slope, WIDE)) * spread_out(rate, WIDE)
    if LESS:
        result = result - d
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _leave(  # type: ignore[no-untyped-def]
    share, gamma, beta, scale, to_gamma, to_beta, to_scale, channel,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, LAST: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Store the sums of a stage without those of its kernel."""
    if GROUP > 0:
        tl.store(share + gamma + channel, to_gamma, mask=channel < OUTPUTS)
        tl.store(share + beta + channel, to_beta, mask=channel < OUTPUTS)
    if LAST:
        tl.store(share + scale + channel, to_scale, mask=channel < OUTPUTS)


@kernel
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

    TO_STREAM: the result is added to the gradient of the stream. This also serves the input of the first convolution,
    as a stage without norm and ReLU in front of it. Sums for γ, β and the scale are left in `sums` (entries, splits,
    parameters).
    """
    entry = tl.program_id(1)
    begin, end = samples_of(valid, entry, per, batch)
    row = tl.load(rows + entry)
    own = matrix + tl.load(members + entry) * parameters
    channel = tl.arange(0, OUT)
    pixels = height * width
    here = entry.to(tl.int64) * batch * pixels
    stream, apart = row_start(main, shadow, row, main_rows, shadow_rows, OUTPUTS)
    gradient, apart = row_start(from_main, from_shadow, row, main_rows, shadow_rows, OUTPUTS)
    target, apart = row_start(to_main, to_shadow, row, main_rows, shadow_rows, OUTPUTS)
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
            place, known = statistics_at(stats, entry, batch, first, end, channel, OUTPUTS, SAMPLES)
            mean = tl.load(place, mask=known, other=0.0)
            rate = tl.load(place + OUTPUTS, mask=known, other=0.0)
        plain = tl.zeros((SAMPLES, OUT), tl.float32)
        along = tl.zeros((SAMPLES, OUT), tl.float32)
        d = tl.zeros((SAMPLES * WIDE, OUT), tl.float32)
        normal = tl.zeros((SAMPLES * WIDE, OUT), tl.float32)
        past = tl.zeros((SAMPLES * WIDE, OUT), tl.float32)
        weighted = past
        if GROUP > 0 or LAST:
            for tile in range(TILES):
                sample, pixel, seen = tile_cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
                d, normal, weighted, past = _incoming(
                    stream + start * apart, apart, gradient + start * apart, following + (here + start) * NEXT,
                    own + next_weight, kept + (here + start) * OUTPUTS, own, mean, rate, factor, kind,
                    sample, pixel, seen, height, width, gamma, beta, scale,
                    OUTPUTS, NEXT, NEXT_SIDE, NEXT_DEPTHWISE, GROUP, RELU, LAST, LESS, MULTIPLIES, WIDE, OUT, NEXT_WIDE,
                )  # fmt: skip
                plain += over_pixels(d, SAMPLES, WIDE)
                along += over_pixels(d * normal, SAMPLES, WIDE)
                to_scale += tl.sum(weighted, 0)
            to_beta += tl.sum(plain, 0)
            to_gamma += tl.sum(along, 0)
        factors = vector(own + gamma, channel, OUTPUTS)
        level = plain
        slope = along
        if GROUP > 0:
            level = over_group(factors * plain, GROUP_WIDE) / (pixels * GROUP)
            slope = over_group(factors * along, GROUP_WIDE) / (pixels * GROUP)
        for tile in range(TILES):
            sample, pixel, seen = tile_cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
            if TILES > 1 or (GROUP == 0 and not LAST):
                d, normal, weighted, past = _incoming(
                    stream + start * apart, apart, gradient + start * apart, following + (here + start) * NEXT,
                    own + next_weight, kept + (here + start) * OUTPUTS, own, mean, rate, factor, kind,
                    sample, pixel, seen, height, width, gamma, beta, scale,
                    OUTPUTS, NEXT, NEXT_SIDE, NEXT_DEPTHWISE, GROUP, RELU, LAST, LESS, MULTIPLIES, WIDE, OUT, NEXT_WIDE,
                )  # fmt: skip
            result = _through_norm(d, normal, factors, level, slope, rate, GROUP, LESS, WIDE)
            offsets = offsets_of(sample, pixel, pixels, apart)
            if TO_STREAM:
                past += result
            else:
                local = offsets_of(sample, pixel, pixels, OUTPUTS)
                store_cells(out + (here + start) * OUTPUTS, local, seen, channel, result, OUTPUTS)
            if TO_STREAM or MULTIPLIES:
                past += load_cells(target + start * apart, offsets, seen, channel, OUTPUTS).to(tl.float32)
                store_cells(target + start * apart, offsets, seen, channel, past, OUTPUTS)
    share = share_of(sums, entry, parameters)
    _leave(share, gamma, beta, scale, to_gamma, to_beta, to_scale, channel, OUTPUTS, GROUP, LAST)


@kernel
def kernel_gradient(  # type: ignore[no-untyped-def]
    main, shadow, source, following, sums, rows, learns,
    main_rows, shadow_rows, batch, per, height, width, parameters, weight,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SIDE: tl.constexpr, DEPTHWISE: tl.constexpr, FIRST: tl.constexpr,  # noqa: N803
    SAMPLES: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One tap of the kernel per program: Σ x·∂L/∂y over its samples, x being the pixel under the tap."""
    entry, tap = tl.program_id(1), tl.program_id(2)
    begin, end = samples_of(learns, entry, per, batch)
    pixels = height * width
    here = entry.to(tl.int64) * batch * pixels
    row = tl.load(rows + entry)
    base, stride = stage_source(main, shadow, source, row, here, main_rows, shadow_rows, INPUTS, FIRST)
    read = tl.arange(0, IN)
    made = tl.arange(0, OUT)
    total = tl.zeros((IN, OUT), tl.float32)
    alone = tl.zeros((OUT,), tl.float32)
    for first in range(begin, end, SAMPLES):
        start = first * pixels
        for tile in range(TILES):
            sample, pixel, seen = tile_cells(first, end, tile * WIDE, pixels, SAMPLES, WIDE)
            y = pixel // width + (tap // SIDE - SIDE // 2)
            x = pixel % width + (tap % SIDE - SIDE // 2)
            inside = seen & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            value = load_cells(
                base + start * stride, offsets_of(sample, y * width + x, pixels, stride), inside, read, INPUTS
            )
            local = offsets_of(sample, pixel, pixels, OUTPUTS)
            d = load_cells(following + (here + start) * OUTPUTS, local, seen, made, OUTPUTS)
            if DEPTHWISE:
                alone += tl.sum(value.to(tl.float32) * d.to(tl.float32), 0)
            else:
                total = tl.dot(tl.trans(value), d, total, input_precision="ieee")
    share = share_of(sums, entry, parameters) + weight + tap
    if DEPTHWISE:
        tl.store(share + made * (SIDE * SIDE), alone, mask=made < OUTPUTS)
    else:
        index = made[None, :] * INPUTS + read[:, None]
        mask = (read < INPUTS)[:, None] & (made < OUTPUTS)[None, :]
        tl.store(share + index * (SIDE * SIDE), total, mask=mask)


@kernel
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
