"""CUDA kernels that blend the output of a group of seeds into the stream.

Entry e with strength s adds s·Δ, s·h·tanh Δ or s·g·Δ by its style, and 0 if it is padding. Torch needs a dozen passes
over the group forward and two dozen backward; here it is one each. Images are stored as (batch, height, width, entries,
channels).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language.extra import libdevice

from esper.kasmina.kernels.launching import kernel
from esper.kasmina.kernels.rows import TILE, tile
from esper.kasmina.row_layout import BACK, STORED
from esper.leyline import BLEND_STYLES

MULTIPLY = tl.constexpr(BLEND_STYLES.index("multiply"))
GATE = tl.constexpr(BLEND_STYLES.index("gate"))
COLUMNS = 256  # of a tile: entries times channels


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed
def _entries_of(  # type: ignore[no-untyped-def]
    sample, gate, style, strength, valid, batch, entries, channels,
    gates: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """A program's columns and whether they exist; style, strength, strength behind the gate and validity of each."""
    column = tl.arange(0, ENTRIES * CHANNELS)
    entry, channel = tl.program_id(1) * ENTRIES + column // CHANNELS, column % CHANNELS
    inside = (entry < entries) & (channel < channels)
    kind = tl.load(style + entry, mask=inside, other=0)
    factor = tl.load(strength + entry, mask=inside, other=0.0).to(tl.float32)
    acts = tl.load(valid + entry, mask=inside, other=0) != 0
    opened = factor
    if gates:
        opened = factor * tl.load(gate + entry * batch + sample, mask=inside, other=0.0).to(tl.float32)
    return entry * channels + channel, inside, kind, factor, opened, acts


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
    h, delta, gate, style, strength, valid, out,
    batch, pixels, entries, channels, chunk,
    multiplies: tl.constexpr, gates: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One sample, a block of entries and a chunk of pixels per program."""
    sample = tl.program_id(0)
    column, inside, kind, factor, opened, acts = _entries_of(
        sample, gate, style, strength, valid, batch, entries, channels, gates, ENTRIES, CHANNELS
    )
    first = tl.program_id(2) * chunk
    for start in range(first, tl.minimum(first + chunk, pixels), ROWS):
        index, seen = tile(sample, start, pixels, column, inside, entries * channels, ROWS)
        d = tl.load(delta + index, mask=seen, other=0.0).to(tl.float32)
        effect = factor[None, :] * d
        if multiplies:
            x = tl.load(h + index, mask=seen & (kind == MULTIPLY)[None, :], other=0.0).to(tl.float32)
            effect = tl.where((kind == MULTIPLY)[None, :], factor[None, :] * x * libdevice.tanh(d), effect)
        if gates:
            effect = tl.where((kind == GATE)[None, :], opened[None, :] * d, effect)
        effect = tl.where(acts[None, :], effect, 0.0)  # padding may hold anything
        tl.store(out + index, effect, mask=seen)


@kernel
def _backward_kernel(  # type: ignore[no-untyped-def]
    h, delta, gate, style, strength, valid, gradient, to_h, to_delta, to_gate,
    batch, pixels, entries, channels,
    multiplies: tl.constexpr, gates: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One sample and a block of entries per program; a gate's gradient is a sum over all pixels and channels."""
    sample = tl.program_id(0)
    column, inside, kind, factor, opened, acts = _entries_of(
        sample, gate, style, strength, valid, batch, entries, channels, gates, ENTRIES, CHANNELS
    )
    total = tl.zeros([ENTRIES * CHANNELS], dtype=tl.float32)
    for start in range(0, pixels, ROWS):
        index, seen = tile(sample, start, pixels, column, inside, entries * channels, ROWS)
        g = tl.load(gradient + index, mask=seen, other=0.0).to(tl.float32)
        result = factor[None, :] * g
        if multiplies or gates:
            d = tl.load(delta + index, mask=seen, other=0.0).to(tl.float32)
        if multiplies:
            chosen = (kind == MULTIPLY)[None, :]
            x = tl.load(h + index, mask=seen & chosen, other=0.0).to(tl.float32)
            t = libdevice.tanh(d)
            through = tl.where(chosen & acts[None, :], factor[None, :] * g * t, 0.0)
            tl.store(to_h + index, through, mask=seen)
            result = tl.where(chosen, factor[None, :] * g * x * (1.0 - t * t), result)
        if gates:
            chosen = (kind == GATE)[None, :]
            total += tl.sum(tl.where(chosen & acts[None, :], factor[None, :] * g * d, 0.0), 0)
            result = tl.where(chosen, opened[None, :] * g, result)
        tl.store(to_delta + index, tl.where(acts[None, :], result, 0.0), mask=seen)
    if gates:
        summed = tl.sum(tl.reshape(total, [ENTRIES, CHANNELS]), 1)
        number = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
        tl.store(to_gate + number * batch + sample, summed, mask=number < entries)


def _blocks(entries: int, channels: int) -> dict[str, int]:
    across = triton.next_power_of_2(channels)
    block = min(triton.next_power_of_2(entries), max(1, COLUMNS // across))
    return {"ROWS": max(1, TILE // (block * across)), "ENTRIES": block, "CHANNELS": across}


class _Blend(torch.autograd.Function):
    """In the order of memory: h and Δ (B, H, W, E, C), gate (E, B)."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, delta: Tensor, gate: Tensor | None, style: Tensor, strength: Tensor, valid: Tensor,
        multiplies: bool,
    ) -> Tensor:  # fmt: skip
        batch, height, width, entries, channels = h.shape
        ctx.save_for_backward(h if multiplies else None, delta, gate, style, strength, valid)
        ctx.multiplies, ctx.shape = multiplies, h.shape
        out = torch.empty_like(delta)
        blocks, pixels = _blocks(entries, channels), height * width
        chunk = triton.cdiv(pixels, 4 * blocks["ROWS"]) * blocks["ROWS"]
        grid = (batch, triton.cdiv(entries, blocks["ENTRIES"]), triton.cdiv(pixels, chunk))
        _forward_kernel[grid](
            h, delta, delta if gate is None else gate, style, strength, valid, out,
            batch, pixels, entries, channels, chunk, multiplies, gate is not None, **blocks,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        h, delta, gate, style, strength, valid = ctx.saved_tensors
        batch, height, width, entries, channels = ctx.shape
        gradient = gradient.contiguous()
        to_delta = torch.empty_like(delta)
        to_h = torch.empty_like(delta) if ctx.multiplies else None
        to_gate = None if gate is None else torch.empty_like(gate)
        blocks = _blocks(entries, channels)
        grid = (batch, triton.cdiv(entries, blocks["ENTRIES"]))
        _backward_kernel[grid](
            delta if h is None else h, delta, delta if gate is None else gate, style, strength, valid, gradient,
            to_delta if to_h is None else to_h, to_delta, to_delta if to_gate is None else to_gate,
            batch, height * width, entries, channels, ctx.multiplies, gate is not None, **blocks,
        )  # fmt: skip
        return to_h, to_delta, to_gate, None, None, None, None


def blend_images(
    h: Tensor, delta: Tensor, gate: Tensor | None, style: Tensor, strength: Tensor, valid: Tensor, *, multiplies: bool
) -> Tensor:
    """What the entries add to h (E, B, C, H, W); `gate` (E, B, 1, 1, 1) where some have one."""
    stored, change = (part.permute(STORED["cuda"]).contiguous() for part in (h, delta))
    flat = None if gate is None else gate.flatten(1).contiguous()
    effect: Tensor = _Blend.apply(stored, change, flat, style, strength, valid, multiplies)  # type: ignore[no-untyped-call]
    return effect.permute(BACK["cuda"])
