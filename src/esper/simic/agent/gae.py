"""Advantages over time."""

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
