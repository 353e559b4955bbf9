"""Advantages: generalised advantage estimation, and its share for each head."""

from typing import NamedTuple

import torch
from torch import Tensor


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    ends: Tensor,
    bootstraps: Tensor,
    forced: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates of all envs at once: a loop over time only.

    All tensors are (envs, steps), `lengths` (envs,). `ends` marks the last step of a segment; `bootstraps` is the value
    after it where the segment was truncated or cut, and 0 where it terminated. With λ' = 1 if the next step is forced
    and λ otherwise:

        δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γ·λ'·A_{t+1}

    so a run of forced steps counts as one transition: the estimate equals that of the process in which they are merged
    into the decision before them. Returns advantages and returns (A + V); both are 0 behind an env's last step.
    """
    steps = rewards.shape[1]
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])
    inside = torch.arange(steps, device=rewards.device) < lengths.unsqueeze(1)
    last = torch.arange(steps, device=rewards.device) == lengths.unsqueeze(1) - 1
    ends = ends | last
    next_values = torch.cat([values[:, 1:], values[:, :1]], 1).where(~ends, bootstraps)
    deltas = rewards + gamma * next_values - values
    traces = torch.full_like(values, gamma * lam)
    traces[:, :-1] = traces[:, :-1].where(~forced[:, 1:], gamma)
    traces = traces.where(~ends, 0.0)
    deltas, traces = deltas.where(inside, 0.0), traces.where(inside, 0.0)
    for step in range(steps - 1, -1, -1):
        following = deltas[:, step] + traces[:, step] * following
        advantages[:, step] = following
    return advantages, (advantages + values).where(inside, 0.0)


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
