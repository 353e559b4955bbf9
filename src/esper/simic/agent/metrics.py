"""What an update tells about itself."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from esper.simic.agent import losses
from esper.simic.agent.config import KL_STOP
from esper.simic.agent.minibatch import Minibatch, PreparedRound


@dataclass(frozen=True)
class HeadMetrics:
    """One head over an update; None where no step gave it a choice."""

    entropy: float | None
    """Normalised, over the steps that used it with a choice."""
    kl: float | None
    clip_fraction: float | None
    grad_norm: float
    """Of its own weights, before clipping, mean over minibatches."""
    learnable_fraction: float
    """Share of the round's steps that it could learn from."""
    uncentred: bool
    """It was used in too few steps for its advantages to be centred."""

    @property
    def learnable(self) -> bool:
        """Whether the round taught it anything."""
        return self.learnable_fraction > 0


@dataclass(frozen=True)
class PPOUpdateMetrics:
    """One update. Means are over its minibatches unless something else is said."""

    policy_loss: float
    value_loss: float
    entropy: float
    """Mean over heads of the normalised entropy."""
    logit_spread: float
    approx_kl: float
    """KL of the joint action in the last minibatch that was looked at: it drives the stop."""
    max_kl: float
    head_kl_mean: float
    """Mean of the heads' KL, weighted by how often each decided."""
    clip_fraction: float
    joint_ratio_max: float
    joint_ratio_min: float
    pre_clip_grad_norm: float
    """Largest global norm before clipping."""
    clip_factor: float
    """Mean factor that clipping applied; 1: none."""
    minibatches_taken: int
    minibatches_not_finite: int
    epochs_run: int
    stopped_by_kl: bool
    behaviour_gap: float
    """max |log-prob recomputed − log-prob collected|"""
    advantage_mean: float
    """Before standardising, over steps that decided something."""
    advantage_std: float
    """Within tasks."""
    advantage_floored: bool
    """In some task of the round advantages varied by less than the floor."""
    advantage_mean_after: float
    advantage_std_after: float
    return_mean: float
    return_std: float
    value_mean: float
    explained_variance: float
    """1 − var(return − value) / var(return); 0 where returns do not vary."""
    forced_fraction: float
    rate: float
    entropy_coefficient: float
    epsilon: float
    steps: int
    heads: dict[str, HeadMetrics]

    def flat(self) -> dict[str, float]:
        """`ppo/<name>` and `ppo/<head>/<name>` → number; what does not exist is left out."""
        result: dict[str, float] = {}
        for field in fields(self):
            if field.name != "heads":
                result[f"ppo/{field.name}"] = float(getattr(self, field.name))
        for head, metrics in self.heads.items():
            for field in fields(metrics):
                value = getattr(metrics, field.name)
                if value is not None:
                    result[f"ppo/{head}/{field.name}"] = float(value)
        return result


class UpdateObserver(Protocol):
    """Is shown every minibatch of an update. It reads and changes nothing; what it wants to keep, it copies."""

    def on_minibatch(self, network: nn.Module, cells: Tensor, log_ratios: Tensor, decided: Tensor) -> None:
        """The network, with gradients as they are before clipping; which cells of the round the minibatch's steps are
        (steps,), the log-ratios of their heads and which of these were decided, (steps, heads) each."""


if TYPE_CHECKING:
    from esper.simic.agent.ppo import PPOAgent


class UpdateRecord:
    """Small tensors per minibatch, left on the device. What follows from ratios is computed for all of them at once."""

    def __init__(self, heads: tuple[str, ...], observer: UpdateObserver | None = None) -> None:
        self.heads, self.observer = heads, observer
        self.epochs = 0
        self.minibatches: list[dict[str, Tensor]] = []
        self.moves: list[list[tuple[Tensor, Tensor]]] = []
        """Per minibatch its pieces: log-ratios and what was decided, (steps, heads) each"""
        self._open: dict[str, Tensor] = {}
        self._moves: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """A minibatch, or the same once more."""
        self._open, self._moves = {}, []

    def note_part(self, log_ratio: Tensor, decided: Tensor, **sums: Tensor) -> None:
        """A piece of the current minibatch; sums add up."""
        self._moves.append((log_ratio.detach(), decided))
        for name, value in sums.items():
            self._open[name] = self._open[name] + value.detach() if name in self._open else value.detach()

    def show(self, network: nn.Module, parts: list[Minibatch]) -> None:
        """The current minibatch, which consists of these pieces, to whoever looks on."""
        if self.observer is not None:
            log_ratios, decided = (torch.cat(pieces) for pieces in zip(*self._moves, strict=True))
            self.observer.on_minibatch(network, torch.cat([part.batch.cells for part in parts]), log_ratios, decided)

    def close(self, **values: Tensor) -> None:
        """The minibatch is complete with these."""
        self.minibatches.append({**self._open, **values})
        self.moves.append(self._moves)

    def read(self, figures: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """These figures, and each of the minibatches' stacked, (minibatches, heads) or (minibatches, 1).

        In float64 on the CPU. Host sync: once per update, for all of them.
        """
        names = self.minibatches[0]
        seen = {name: torch.stack([row[name] for row in self.minibatches if name in row]) for name in names}
        everything = {**figures, **seen}
        flat = torch.cat([tensor.double().flatten() for tensor in everything.values()]).cpu()
        parts = dict(zip(everything, flat.split([t.numel() for t in everything.values()]), strict=True))
        return {name: parts[name] for name in figures}, {name: parts[name].view(len(seen[name]), -1) for name in seen}

    def movement(self, lesson: PreparedRound, clip: float) -> dict[str, Tensor]:
        """How far the policy had moved at each minibatch: (minibatches, heads), (minibatches,) for the joint action."""
        pieces = [piece for minibatch in self.moves for piece in minibatch]
        log_ratio, decided = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        rows = [place for place, minibatch in enumerate(self.moves) for _ in minibatch]
        which = lesson.buffer.moved(np.repeat(rows, [len(piece[0]) for piece in pieces]))
        ratio = log_ratio.exp()
        zeros = log_ratio.new_zeros((len(self.moves), log_ratio.shape[1]))
        head_kl = zeros.index_add(0, which, losses.kl_terms(ratio, log_ratio).where(decided, 0.0))
        outside = ((ratio - 1).abs() > clip) & decided
        joint = log_ratio.where(decided, 0.0).sum(-1)
        return {
            "kl": head_kl.sum(-1) * lesson.per_decision,
            "head_kl": head_kl * lesson.per_head,
            "clipped": zeros.index_add(0, which, outside.to(zeros.dtype)) * lesson.per_head,
            "low": zeros[:, 0].scatter_reduce(0, which, joint, "amin", include_self=False),
            "high": zeros[:, 0].scatter_reduce(0, which, joint, "amax", include_self=False),
        }


def summarise(lesson: PreparedRound, record: UpdateRecord, agent: "PPOAgent") -> PPOUpdateMetrics:
    """The metrics of an update."""
    moves = record.movement(lesson, agent.config.clip_at(agent.progress))
    round_figures, seen = record.read(_round_figures(lesson) | moves)
    seen |= {name: round_figures.pop(name).view(len(record.minibatches), -1) for name in moves}
    numbers = {name: float(value) for name, value in round_figures.items() if value.numel() == 1}
    halted, finite = seen["halted"].bool().squeeze(1), seen["norm"].isfinite().squeeze(1)
    taken = ~halted & finite
    mean = {name: _mean(values, ~halted) for name, values in seen.items()}
    counts = round_figures["head_counts"]
    weight = counts / counts.sum().clamp(min=1)
    return PPOUpdateMetrics(
        policy_loss=float(mean["policy_loss"]),
        value_loss=float(mean["value_loss"]),
        entropy=float(mean["entropies"].mean()),
        logit_spread=float(mean["spread"]),
        approx_kl=float(seen["kl"][-1]),
        max_kl=float(seen["kl"].max()),
        head_kl_mean=float((mean["head_kl"] * weight).sum()),
        clip_fraction=float((mean["clipped"] * weight).sum()),
        joint_ratio_max=float(seen["high"].max().exp()),
        joint_ratio_min=float(seen["low"].min().exp()),
        pre_clip_grad_norm=float(seen["norm"].max()),
        clip_factor=float(_mean(seen["factor"], finite)),
        minibatches_taken=int(taken.sum()),
        minibatches_not_finite=int((~finite).sum()),
        epochs_run=record.epochs,
        stopped_by_kl=_stopped(seen, agent),
        heads=_head_metrics(lesson, mean, round_figures, record.heads),
        rate=agent.config.rate_at(agent.progress),
        entropy_coefficient=agent.config.entropy_at(agent.progress),
        epsilon=lesson.buffer.epsilon,
        steps=lesson.buffer.steps,
        behaviour_gap=numbers["gap"],
        advantage_mean=numbers["advantage_mean"],
        advantage_std=numbers["advantage_std"],
        advantage_floored=bool(numbers["floored"]),
        advantage_mean_after=numbers["advantage_mean_after"],
        advantage_std_after=numbers["advantage_std_after"],
        return_mean=numbers["return_mean"],
        return_std=numbers["return_std"],
        value_mean=numbers["value_mean"],
        explained_variance=numbers["explained_variance"],
        forced_fraction=numbers["forced"],
    )


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Over the chosen minibatches, or all where none is chosen; of those that have a value, which come first."""
    chosen = chosen[: len(values)]
    return values[chosen].mean(0) if bool(chosen.any()) else values.mean(0)


def _stopped(seen: dict[str, Tensor], agent: "PPOAgent") -> bool:
    target = agent.config.target_kl
    return target is not None and bool((seen["kl"] > KL_STOP * target).any())


def _head_metrics(
    lesson: PreparedRound, mean: dict[str, Tensor], figures: dict[str, Tensor], heads: tuple[str, ...]
) -> dict[str, HeadMetrics]:
    shares = figures["head_counts"] / lesson.buffer.steps
    result = {}
    for place, name in enumerate(heads):
        taught = bool(figures["head_counts"][place] > 0)
        entropy, kl, clipped = (
            float(mean[key][place]) if taught else None for key in ("entropies", "head_kl", "clipped")
        )
        result[name] = HeadMetrics(
            entropy,
            kl,
            clipped,
            float(mean["head_norms"][place]),
            float(shares[place]),
            bool(figures["uncentred"][place]),
        )
    return result


def _round_figures(lesson: PreparedRound) -> dict[str, Tensor]:
    """Figures of the round."""
    valid = lesson.buffer.valid.flatten()
    forced = valid & ~lesson.reference.decided.any(-1)
    deciding = valid & ~forced
    returns, values = lesson.returns, lesson.buffer.values.flatten()
    return_mean, return_var = _moments(returns, valid)
    _, left = _moments(returns - values, valid)
    mean, var = _moments(lesson.advantages.by_head[0], deciding)
    standardised, shares = lesson.standardised, _task_shares(lesson, deciding)
    return {
        "gap": lesson.reference.gap,
        "advantage_mean": (shares * standardised.mean).sum(),
        "advantage_std": (shares * standardised.std).sum(),
        "floored": standardised.floored.any(),
        "advantage_mean_after": mean,
        "advantage_std_after": var.sqrt(),
        "return_mean": return_mean,
        "return_std": return_var.sqrt(),
        "value_mean": _moments(values, valid)[0],
        "explained_variance": torch.where(return_var > 0, 1 - left / return_var, 0.0),
        "forced": forced.sum() / valid.sum(),
        "head_counts": (lesson.reference.decided & valid.unsqueeze(1)).sum(0),
        "uncentred": lesson.advantages.uncentred,
    }


def _task_shares(lesson: PreparedRound, deciding: Tensor) -> Tensor:
    """(tasks,): which share of the decisions each task has; a round need not hold all of them."""
    tasks = lesson.buffer.tasks.repeat_interleave(lesson.buffer.capacity)
    zeros = torch.zeros_like(lesson.standardised.mean)
    return zeros.index_add(0, tasks, deciding.to(zeros.dtype)) / lesson.decisions


def _moments(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the chosen entries."""
    count = chosen.sum().clamp(min=1)
    mean = values.where(chosen, 0.0).sum() / count
    return mean, (values - mean).square().where(chosen, 0.0).sum() / count
