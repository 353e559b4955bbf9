"""A CUDA kernel for a step of SGD with momentum over stacked weights (members, parameters).

For every member that takes part and whose gradient g is finite:

    g ← g·min(1, clip/(‖g‖ + ε)),   v ← μ·v + g + λ·w,   w ← w − rate·v

One program per member reads its gradient twice: for the norm, then for the step. In plain torch this is
`StackedOptimizer`.
"""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from esper.kasmina.kernels.launching import kernel

BLOCK = 4096


class Sgd(NamedTuple):
    """Settings of a step."""

    clip_norm: float
    eps: float
    momentum: float
    weight_decay: float


@kernel
def _sgd_kernel(  # type: ignore[no-untyped-def]
    gradient, matrix, velocity, steps, rates, takes_part, newborn, warm, used, norms, ratios,
    parameters, clip, eps, momentum, decay,
    WARMS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One member per program."""
    member = tl.program_id(0)
    part = tl.load(takes_part + member) != 0
    start = member.to(tl.int64) * parameters
    end = tl.where(part, parameters, 0)
    square = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < parameters
        if MASKED:
            inside = inside & (tl.load(used + start + column, mask=inside, other=0) != 0)
        g = tl.load(gradient + start + column, mask=inside, other=0.0)
        square += g * g
    norm = tl.sqrt(tl.sum(square, 0))
    tl.store(norms + member, norm)
    factor = tl.minimum(clip / (norm + eps), 1.0)
    rate = tl.load(rates + member)
    if WARMS:
        rate = tl.where(tl.load(newborn + member) != 0, rate * tl.load(warm), rate)
    moves = part & (norm < float("inf"))  # false for NaN, too
    end = tl.where(moves, parameters, 0)
    moved = tl.zeros((BLOCK,), tl.float32)
    size = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < parameters
        index = start + column
        w = tl.load(matrix + index, mask=inside, other=0.0)
        size += w * w
        if MASKED:
            inside = inside & (tl.load(used + index, mask=inside, other=0) != 0)
        g = tl.load(gradient + index, mask=inside, other=0.0)
        v = momentum * tl.load(velocity + index, mask=inside, other=0.0) + g * factor + decay * w
        v = tl.where(inside, v, 0.0)
        tl.store(velocity + index, v, mask=inside)
        tl.store(matrix + index, w - rate * v, mask=inside)
        moved += rate * rate * v * v
    tl.store(ratios + member, tl.where(moves, tl.sqrt(tl.sum(moved, 0)) / tl.sqrt(tl.sum(size, 0)), 0.0))
    tl.store(steps + member, tl.load(steps + member) + tl.where(moves, 1.0, 0.0))


def sgd_step(
    settings: Sgd,
    gradient: Tensor,
    matrix: Tensor,
    velocity: Tensor,
    steps: Tensor,
    rates: Tensor,
    takes_part: Tensor,
    used: Tensor | None,
    newborn: Tensor | None,
    warm: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Step in place. Returns per member the norm of its gradient, 0 if it takes no part, and the norm of its update
    relative to that of its weights."""
    norms, ratios = matrix.new_empty(2, len(matrix))
    _sgd_kernel[(len(matrix),)](
        gradient, matrix, velocity, steps, rates, takes_part, rates if newborn is None else newborn,
        rates if warm is None else warm, takes_part if used is None else used, norms, ratios,
        matrix.shape[1], *settings, newborn is not None, used is not None, BLOCK, num_warps=8,
    )  # fmt: skip
    return norms, ratios
