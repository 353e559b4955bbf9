"""Advantages and the terms of PPO's loss: pure functions of tensors.

Loss terms are sums over the steps of a minibatch. The caller divides them by counts over the whole round, so that the
gradient does not depend on how a round is divided into minibatches and pieces.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CENTRED_FROM = 8
"""A mean over fewer steps would say more about the draw than about the head."""
LOG_RATIO_LIMIT = 20.0
"""log r is clamped to ± 20 before exp: far beyond any clip range, and e²⁰ squared is still finite in float32."""


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
    """Generalised advantage estimates of all envs at once, and the returns A + V. Both are 0 after an env's last step.

    All tensors are (envs, steps), `lengths` (envs,). `ends` marks the last step of a sequence; `bootstraps` is the
    value after it if the sequence was truncated or cut, and 0 if it terminated. λ' is 1 if the next step is forced,
    else λ:

        δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γ·λ'·A_{t+1}

    A run of forced steps thus counts as one transition: the estimate equals that of the process in which forced steps
    are merged into the decision before them.
    """
    time = torch.arange(rewards.shape[1], device=rewards.device)
    inside = time < lengths.unsqueeze(1)
    ends = ends | (time == lengths.unsqueeze(1) - 1)
    next_values = torch.cat([values[:, 1:], values[:, :1]], 1).where(~ends, bootstraps)
    deltas = rewards + gamma * next_values - values
    traces = torch.full_like(values, gamma * lam)
    traces[:, :-1] = traces[:, :-1].where(~forced[:, 1:], gamma)
    traces = traces.where(~ends, 0.0)
    deltas, traces = deltas.where(inside, 0.0), traces.where(inside, 0.0)
    advantages, following = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for step in reversed(range(len(time))):
        following = deltas[:, step] + traces[:, step] * following
        advantages[:, step] = following
    return advantages, (advantages + values).where(inside, 0.0)


def leave_one_out(advantages: Tensor, valid: Tensor, groups: Tensor) -> Tensor:
    """Advantages minus the mean of the other members of the group at the same step; (envs, steps), groups (envs,).

    Members of a group meet the same host, so that what the critic does not know of it shows in the others too. They
    choose independently, so the baseline is unbiased. An env without others at a step keeps its advantage.
    """
    present = valid.to(advantages.dtype)
    zeros = torch.zeros_like(advantages)  # there are at most as many groups as envs
    totals = zeros.index_add(0, groups, advantages * present)[groups] - advantages * present
    others = zeros.index_add(0, groups, present)[groups] - present
    return advantages - (totals / others.clamp(min=1)).where(valid, 0.0)


class HeadAdvantages(NamedTuple):
    """Advantages per head."""

    by_head: tuple[Tensor, ...]  # (n,) per head; the first head's is the given tensor itself
    uncentred: Tensor  # (heads,) bool: too few steps used the head to centre its advantages, or centring is off


def compute_per_head_advantages(advantages: Tensor, decided: Tensor, *, centred: bool = True) -> HeadAdvantages:
    """Advantages (n,) relative to their mean over the steps that used each head, `decided` (n, heads) bool; meaningless
    elsewhere. Without the mean, a head that is used only when things go well would reinforce what it drew first."""
    if not centred:
        return HeadAdvantages((advantages,) * decided.shape[1], torch.ones_like(decided[0]))
    counts = decided.sum(0)
    totals = advantages.unsqueeze(1).where(decided, 0.0).sum(0)
    uncentred = counts < CENTRED_FROM
    means = torch.where(uncentred, 0.0, totals / counts.clamp(min=1))
    return HeadAdvantages((advantages, *(advantages - means[head] for head in range(1, decided.shape[1]))), uncentred)


class Standardised(NamedTuple):
    """Advantages on a common scale, and their moments before, (tasks,) each."""

    advantages: Tensor
    mean: Tensor
    std: Tensor
    floored: Tensor  # bool: the deviation was below the floor; False for tasks without a step


def standardise(advantages: Tensor, weight: Tensor, tasks: Tensor, n_tasks: int, floor: float | Tensor) -> Standardised:
    """Centre and scale advantages (n,) per task by their moments over the steps with `weight` (n,) bool. The floor of
    the deviation, or (n_tasks,), keeps rounds without differences from being scaled up into noise."""
    zeros = torch.zeros(n_tasks, dtype=advantages.dtype, device=advantages.device)
    count = zeros.index_add(0, tasks, weight.to(advantages.dtype))
    divisor = count.clamp(min=1)
    mean = zeros.index_add(0, tasks, advantages.where(weight, 0.0)) / divisor
    gaps = advantages - mean[tasks]
    std = (zeros.index_add(0, tasks, gaps.square().where(weight, 0.0)) / divisor).sqrt()
    return Standardised(gaps / std.clamp(min=floor)[tasks], mean, std, (std < floor) & (count > 0))


def ratios(log_probs: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """r = π/π_old and log r, finite for all finite log-probs."""
    log_ratio = (log_probs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp(), log_ratio


def surrogate(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's pessimistic objective, negated: −min(r·A, clip(r, 1 ± ε)·A), element by element."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def joint_surrogate(log_ratio: Tensor, decided: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Sum over steps of the joint action's surrogate, from log-ratios (n, heads) and advantages (n,). One head that has
    moved far removes the gradient of all heads of its step."""
    joint = log_ratio.where(decided, 0.0).sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return masked_sum(surrogate(joint, advantages, clip), decided.any(-1))


def kl_terms(ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """r − 1 − log r: an estimate of KL(π_old ‖ π) from samples of π_old, never negative but for rounding."""
    return ratio - 1 - log_ratio


def value_errors(
    values: Tensor, targets: Tensor, old: Tensor, *, clip: float | None = None, huber: float | None = None
) -> Tensor:
    """Half the squared error (or Huber's loss) per step. With `clip`, the pessimistic variant: the larger of this error
    and that of the value clipped to `old` ± clip."""

    def errors(values: Tensor) -> Tensor:
        if huber is None:
            return 0.5 * (values - targets).square()
        return F.huber_loss(values, targets, reduction="none", delta=huber)

    if clip is None:
        return errors(values)
    return torch.maximum(errors(values), errors(old + (values - old).clamp(-clip, clip)))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over steps where the mask is set, (n, …) → (…). Masked values may be anything, even not finite. Their
    gradient is 0, so only their inputs must be differentiable there; clamped ratios are."""
    return values.where(mask, 0.0).sum(0)
