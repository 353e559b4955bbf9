"""Which step teaches which head."""

from typing import NamedTuple

import torch
from torch import Tensor

CENTRED_FROM = 8
"""A mean over fewer steps would say more about the draw than about the head."""


class HeadAdvantages(NamedTuple):
    """Advantages per head, and how they came about."""

    by_head: tuple[Tensor, ...]
    """(n,) per head; that of the first is the tensor that was given."""
    uncentred: Tensor
    """(heads,) bool: used in too few steps to be centred, or not to be (the first, the common base, never is here)."""


def compute_per_head_advantages(advantages: Tensor, decided: Tensor, *, centred: bool = True) -> HeadAdvantages:
    """A head learns from the steps that used it, relative to their mean.

    Advantages (n,) and which heads each step used (n, heads) bool, on any device. Without the mean, a head that is used
    only when things go well would reinforce whatever it drew first; `centred` off shows that. Values at steps that did
    not use a head mean nothing.
    """
    if not centred:
        return HeadAdvantages((advantages,) * decided.shape[1], torch.ones_like(decided[0]))
    counts = decided.sum(0)
    totals = advantages.unsqueeze(1).where(decided, 0.0).sum(0)
    uncentred = counts < CENTRED_FROM
    means = torch.where(uncentred, 0.0, totals / counts.clamp(min=1))
    return HeadAdvantages((advantages, *(advantages - means[head] for head in range(1, decided.shape[1]))), uncentred)


class Standardised(NamedTuple):
    """Advantages on a common scale, with the moments they had before."""

    advantages: Tensor
    mean: Tensor
    """(tasks,)"""
    std: Tensor
    floored: Tensor
    """(tasks,) bool: the spread was below the floor, which divides instead. False where a task had no step."""


def standardise(advantages: Tensor, weight: Tensor, tasks: Tensor, n_tasks: int, floor: float) -> Standardised:
    """Centre and scale advantages (n,) per task by their mean and deviation over the steps with `weight` (n,) bool.

    The floor keeps rounds in which nothing differed from being blown up into noise. What other steps hold has no
    influence.
    """
    zeros = torch.zeros(n_tasks, dtype=advantages.dtype, device=advantages.device)
    count = zeros.index_add(0, tasks, weight.to(advantages.dtype))
    some = count.clamp(min=1)
    mean = zeros.index_add(0, tasks, advantages.where(weight, 0.0)) / some
    gaps = advantages - mean[tasks]
    std = (zeros.index_add(0, tasks, gaps.square().where(weight, 0.0)) / some).sqrt()
    return Standardised(gaps / std.clamp(min=floor)[tasks], mean, std, (std < floor) & (count > 0))
