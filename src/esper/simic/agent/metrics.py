"""Metrics of an update: what it records of each minibatch, and their summary."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from esper.simic.agent import losses
from esper.simic.agent.config import KL_STOP
from esper.simic.agent.minibatch import PreparedRound

if TYPE_CHECKING:
    from esper.simic.agent.ppo import PPOAgent


@dataclass(frozen=True)
class HeadMetrics:
    """One head over an update, as `nissa.catalogue` describes it; None if no step gave it a choice."""

    entropy: float | None
    kl: float | None
    clip_fraction: float | None
    grad_norm: float
    learnable_fraction: float
    uncentred: bool


@dataclass(frozen=True)
class PPOUpdateMetrics:
    """One update. `nissa.catalogue` describes each number; means are over minibatches."""

    policy_loss: float
    value_loss: float
    entropy: float
    logit_spread: float
    approx_kl: float
    max_kl: float
    head_kl_mean: float
    clip_fraction: float
    joint_ratio_max: float
    joint_ratio_min: float
    pre_clip_grad_norm: float
    clip_factor: float
    minibatches_taken: int
    minibatches_not_finite: int
    epochs_run: int
    stopped_by_kl: bool
    behaviour_gap: float
    advantage_mean: float
    advantage_std: float
    advantage_floored: bool
    advantage_mean_after: float
    advantage_std_after: float
    return_mean: float
    return_std: float
    value_mean: float
    explained_variance: float
    forced_fraction: float
    rate: float
    entropy_coefficient: float
    epsilon: float
    steps: int
    heads: dict[str, HeadMetrics]

    def flat(self) -> dict[str, float]:
        """`ppo/<name>` and `ppo/<head>/<name>` → number, without the missing ones."""
        numbers = {f"ppo/{name}": value for name, value in vars(self).items() if name != "heads"}
        for head, metrics in self.heads.items():
            numbers |= {f"ppo/{head}/{name}": value for name, value in vars(metrics).items()}
        return {name: float(value) for name, value in numbers.items() if value is not None}


class UpdateObserver(Protocol):
    """Sees every minibatch of an update. It must change nothing, and copy what it stores."""

    def on_minibatch(self, network: nn.Module, cells: Tensor, log_ratios: Tensor, decided: Tensor) -> None:
        """The network with gradients before clipping; the minibatch's cells of the round (steps,), the log-ratios of
        their heads and which of these were decided, (steps, heads) each."""


class MinibatchRecord(NamedTuple):
    """What an update records of a minibatch, on the device."""

    log_ratios: Tensor  # (steps, heads)
    decided: Tensor  # (steps, heads) bool
    figures: dict[str, Tensor]  # scalars, or (heads,)


def summarise(
    prepared: PreparedRound, records: list[MinibatchRecord], epochs: int, agent: "PPOAgent"
) -> PPOUpdateMetrics:
    """The metrics of an update."""
    config, progress, buffer = agent.config, agent.progress, prepared.buffer
    by_round, by_minibatch = _read(prepared, records, config.clip_at(progress))
    counts, uncentred = by_round.pop("head_counts"), by_round.pop("uncentred")
    halted, finite = by_minibatch["halted"].bool().squeeze(1), by_minibatch["norm"].isfinite().squeeze(1)
    mean = {name: _mean(values, ~halted) for name, values in by_minibatch.items()}
    weight = counts / counts.sum().clamp(min=1)
    heads = {}
    for index, name in enumerate(agent.table.names):
        learnable = bool(counts[index] > 0)
        entropy, kl, clipped = (
            float(mean[key][index]) if learnable else None for key in ("entropies", "head_kl", "clipped")
        )
        norm, share = float(mean["head_norms"][index]), float(counts[index] / buffer.steps) * (not agent.critic_alone)
        heads[name] = HeadMetrics(entropy, kl, clipped, norm, share, bool(uncentred[index]))
    return PPOUpdateMetrics(
        policy_loss=float(mean["policy_loss"]),
        value_loss=float(mean["value_loss"]),
        entropy=float(mean["entropies"].mean()),
        logit_spread=float(mean["spread"]),
        approx_kl=float(by_minibatch["kl"][-1]),
        max_kl=float(by_minibatch["kl"].max()),
        head_kl_mean=float((mean["head_kl"] * weight).sum()),
        clip_fraction=float((mean["clipped"] * weight).sum()),
        joint_ratio_max=float(by_minibatch["high"].max().exp()),
        joint_ratio_min=float(by_minibatch["low"].min().exp()),
        pre_clip_grad_norm=float(by_minibatch["norm"].max()),
        clip_factor=float(_mean(by_minibatch["factor"], finite)),
        minibatches_taken=int((~halted & finite).sum()),
        minibatches_not_finite=int((~finite).sum()),
        epochs_run=epochs,
        stopped_by_kl=config.target_kl is not None and bool((by_minibatch["kl"] > KL_STOP * config.target_kl).any()),
        advantage_floored=bool(by_round.pop("floored")),
        rate=config.rate_at(progress),
        entropy_coefficient=config.entropy_at(progress),
        epsilon=buffer.epsilon,
        steps=buffer.steps,
        heads=heads,
        **{name: float(value) for name, value in by_round.items()},
    )


def _read(
    prepared: PreparedRound, records: list[MinibatchRecord], clip: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Figures of the round, and those of minibatches (minibatches, heads or 1), in float64 on the CPU. Device sync: one
    for all of them. Figures that only the first epoch has come from its minibatches."""
    by_round, by_minibatch = _round_figures(prepared), _movement(prepared, records, clip)
    for name in records[0].figures:
        by_minibatch[name] = torch.stack([record.figures[name] for record in records if name in record.figures])
    tensors = [*by_round.values(), *by_minibatch.values()]
    flat = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu()
    parts = iter(flat.split([tensor.numel() for tensor in tensors]))
    on_host = {name: next(parts) for name in by_round}
    return on_host, {name: next(parts).view(len(rows), -1) for name, rows in by_minibatch.items()}


def _movement(prepared: PreparedRound, records: list[MinibatchRecord], clip: float) -> dict[str, Tensor]:
    """How far the policy had moved at each minibatch: (minibatches, heads), (minibatches,) for the joint action."""
    log_ratio, decided = (torch.cat(parts) for parts in list(zip(*records, strict=True))[:2])
    lengths = [len(record.log_ratios) for record in records]
    rows = prepared.buffer.moved(np.repeat(np.arange(len(records)), lengths))
    ratio = log_ratio.exp()
    zeros = log_ratio.new_zeros((len(records), log_ratio.shape[1]))
    head_kl = zeros.index_add(0, rows, losses.kl_terms(ratio, log_ratio).where(decided, 0.0))
    outside = ((ratio - 1).abs() > clip) & decided
    joint = log_ratio.where(decided, 0.0).sum(-1)
    return {
        "kl": head_kl.sum(-1) * prepared.per_decision,
        "head_kl": head_kl * prepared.per_head,
        "clipped": zeros.index_add(0, rows, outside.to(zeros.dtype)) * prepared.per_head,
        "low": zeros[:, 0].scatter_reduce(0, rows, joint, "amin", include_self=False),
        "high": zeros[:, 0].scatter_reduce(0, rows, joint, "amax", include_self=False),
    }


def _round_figures(prepared: PreparedRound) -> dict[str, Tensor]:
    """Figures of the round, most of them fields of `PPOUpdateMetrics`."""
    buffer, standardised = prepared.buffer, prepared.standardised
    valid = buffer.valid.flatten()
    forced = valid & ~prepared.reference.decided.any(-1)
    deciding = valid & ~forced
    returns, values = prepared.returns, buffer.values.flatten()
    return_mean, return_var = _moments(returns, valid)
    _, residual_var = _moments(returns - values, valid)
    mean, var = _moments(prepared.advantages.by_head[0], deciding)
    zeros = torch.zeros_like(standardised.mean)
    task_shares = zeros.index_add(0, buffer.cell_tasks, deciding.to(zeros.dtype)) / prepared.decisions
    return {
        "behaviour_gap": prepared.reference.gap,
        "advantage_mean": (task_shares * standardised.mean).sum(),
        "advantage_std": (task_shares * standardised.std).sum(),
        "floored": standardised.floored.any(),
        "advantage_mean_after": mean,
        "advantage_std_after": var.sqrt(),
        "return_mean": return_mean,
        "return_std": return_var.sqrt(),
        "value_mean": _moments(values, valid)[0],
        "explained_variance": torch.where(return_var > 0, 1 - residual_var / return_var, 0.0),
        "forced_fraction": forced.sum() / valid.sum(),
        "head_counts": (prepared.reference.decided & valid.unsqueeze(1)).sum(0),
        "uncentred": prepared.advantages.uncentred,
    }


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen minibatches, or all if none is chosen. `values` may cover only the first ones."""
    chosen = chosen[: len(values)]
    return values[chosen].mean(0) if bool(chosen.any()) else values.mean(0)


def _moments(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    count = chosen.sum().clamp(min=1)
    mean = values.where(chosen, 0.0).sum() / count
    return mean, (values - mean).square().where(chosen, 0.0).sum() / count
