"""What a round teaches: fixed before the first epoch, and then only cut into minibatches."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.simic.agent.advantages import (
    HeadAdvantages,
    Standardised,
    compute_gae,
    compute_per_head_advantages,
    standardise,
)
from esper.simic.agent.config import GAP_REFUSED, PPOConfig
from esper.simic.agent.rollout import Batch, TamiyoRolloutBuffer
from esper.simic.control import ReturnNormalizer
from esper.tamiyo.heads import Masks


class Reference(NamedTuple):
    """The policy before the update, over all cells of the round (rows × columns, …)."""

    log_probs: Tensor
    """(cells, heads)"""
    decided: Tensor
    """(cells, heads) bool: heads that were used and had a choice"""
    values: Tensor
    """(cells,), normalised"""
    gap: Tensor
    """max |log-prob − the one that was collected|"""

    @property
    def accepted(self) -> Tensor:
        """Whether this policy collected the round; not so where the gap is not a number."""
        return self.gap <= GAP_REFUSED


class Minibatch(NamedTuple):
    """A minibatch, or a piece of one: its steps in packed order."""

    batch: Batch
    observations: Tensor
    masks: Masks
    actions: Tensor
    log_probs: Tensor
    decided: Tensor
    values: Tensor
    advantages: Tensor
    """(steps, heads)"""
    targets: Tensor
    weights: Tensor
    """Weight of each step in the value loss."""


class PreparedRound(NamedTuple):
    """A round with its advantages and targets, over all cells; and what sums over it are divided by."""

    buffer: TamiyoRolloutBuffer
    reference: Reference
    advantages: HeadAdvantages
    standardised: Standardised
    returns: Tensor
    """(cells,)"""
    targets: Tensor
    """(cells,), normalised"""
    weights: Tensor
    """(cells,): 1 where something was decided, less where the step was forced, 0 where there is none"""
    decisions: Tensor
    """Steps of the round that decided anything"""
    per_head: Tensor
    """(heads,): what sums over a minibatch are multiplied by: minibatches of an epoch / steps of the round that decided
    this head. So the mean over minibatches is that of the round, however large each of them is."""
    per_decision: Tensor
    """The same for sums over steps that decided anything"""
    per_weight: Tensor
    """The same for sums weighted by `weights`"""

    def part(self, batch: Batch) -> Minibatch:
        """One gather of everything that a batch needs."""
        buffer, cells = self.buffer, batch.cells
        return Minibatch(
            batch,
            *gather_inputs(buffer, batch),
            self.reference.log_probs[cells],
            self.reference.decided[cells],
            self.reference.values[cells],
            torch.stack([advantages[cells] for advantages in self.advantages.by_head], -1),
            self.targets[cells],
            self.weights[cells],
        )


def gather_inputs(buffer: TamiyoRolloutBuffer, batch: Batch) -> tuple[Tensor, Masks, Tensor]:
    """Observations, masks and actions of a batch's steps."""
    cells = batch.cells
    masks = {name: mask.flatten(0, 1)[cells] for name, mask in buffer.masks.items()}
    return buffer.observations.flatten(0, 1)[cells], masks, buffer.actions.flatten(0, 1)[cells]


def prepare_round(
    buffer: TamiyoRolloutBuffer,
    reference: Reference,
    returns_normalizer: ReturnNormalizer,
    config: PPOConfig,
    minibatches: int,
) -> PreparedRound:
    """Advantages, returns and targets of a round. The statistics of returns take it in, unless it is refused or holds
    a return that is not finite."""
    valid = buffer.valid
    forced = ~reference.decided.any(-1)
    advantages, returns = compute_gae(
        buffer.rewards,
        buffer.values,
        buffer.ends,
        buffer.bootstraps,
        forced.view_as(valid),
        buffer.lengths,
        gamma=config.gamma,
        lam=config.lam,
    )
    valid, advantages, returns = valid.flatten(), advantages.flatten(), returns.flatten()
    tasks = buffer.tasks.repeat_interleave(buffer.capacity)
    deciding = valid & ~forced
    n_tasks = len(returns_normalizer.statistics.mean)
    standardised = standardise(advantages, deciding, tasks, n_tasks, config.advantage_floor)
    decided = reference.decided & valid.unsqueeze(1)
    # Decided on the device, without a sync: statistics that nothing is chosen for stay as they are.
    sound = reference.accepted & returns.isfinite().all()
    returns_normalizer.update(returns, tasks, valid & sound)
    weights = torch.where(deciding, 1.0, config.forced_value_weight) * valid
    weight, decisions = weights.sum(), deciding.sum().clamp(min=1)
    return PreparedRound(
        buffer,
        reference,
        compute_per_head_advantages(standardised.advantages, decided, centred=config.centred),
        standardised,
        returns,
        returns_normalizer.normalise(returns, tasks),
        weights,
        decisions,
        minibatches / decided.sum(0).clamp(min=1),
        minibatches / decisions,
        minibatches / weight.where(weight > 0, 1.0),
    )
