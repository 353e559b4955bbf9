"""A round prepared for its update, and the minibatches it is divided into."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.simic.agent import losses
from esper.simic.agent.config import GAP_REFUSED, PPOConfig
from esper.simic.agent.rollout import Batch, TamiyoRolloutBuffer
from esper.simic.control import ReturnNormalizer
from esper.tamiyo.heads import Masks


class Reference(NamedTuple):
    """The policy before the update, over all cells of the round (rows × columns)."""

    log_probs: Tensor  # (cells, heads)
    decided: Tensor  # (cells, heads) bool: heads that were used and had several legal choices
    values: Tensor  # (cells,), normalised; in a prepared round with the statistics after it
    gap: Tensor  # max |log-prob − collected log-prob|
    start: Tensor | None = None  # (cells, heads): log-probs of the policy that the run started with, while it is held

    @property
    def accepted(self) -> Tensor:
        """Whether this policy collected the round; False if the gap is NaN."""
        return self.gap <= GAP_REFUSED


class Minibatch(NamedTuple):
    """A minibatch, or a piece of one: its steps in packed order."""

    batch: Batch
    observations: Tensor
    masks: Masks
    actions: Tensor
    log_probs: Tensor  # (steps, heads), of the reference; so are `decided` and `values`
    decided: Tensor
    values: Tensor
    advantages: Tensor  # (steps, heads)
    targets: Tensor
    weights: Tensor  # (steps,), in the value loss
    start: Tensor | None  # (steps, heads)


class PreparedRound(NamedTuple):
    """A round with its advantages and value targets over all cells, fixed before the first epoch.

    Sums over a minibatch are multiplied by `per_…`: minibatches per epoch / count over the round. The mean over
    minibatches is then that of the round, whatever their sizes.
    """

    buffer: TamiyoRolloutBuffer
    reference: Reference
    advantages: losses.HeadAdvantages
    standardised: losses.Standardised
    returns: Tensor  # (cells,)
    targets: Tensor  # (cells,): normalised returns
    weights: Tensor  # (cells,): 1 for decisions, less for forced steps, 0 for empty cells
    decisions: Tensor  # number of steps that decided anything
    per_head: Tensor  # (heads,): for sums over steps that decided each head
    per_decision: Tensor  # for sums over steps that decided anything
    per_weight: Tensor  # for sums weighted by `weights`

    def minibatch(self, batch: Batch) -> Minibatch:
        """Everything that the loss of a batch needs."""
        cells, reference = batch.cells, self.reference
        advantages = torch.stack([advantages[cells] for advantages in self.advantages.by_head], -1)
        sources = (reference.log_probs, reference.decided, reference.values, self.targets, self.weights)
        log_probs, decided, values, targets, weights = (source[cells] for source in sources)
        inputs = gather_inputs(self.buffer, batch)
        start = None if reference.start is None else reference.start[cells]
        return Minibatch(batch, *inputs, log_probs, decided, values, advantages, targets, weights, start)


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
    """Advantages and targets of a round. Statistics of returns are updated if it is accepted and all are finite."""
    forced = ~reference.decided.any(-1)
    cells = (buffer.rewards, buffer.values, buffer.ends, buffer.bootstraps, forced.view_as(buffer.ends))
    advantages, returns = losses.compute_gae(*cells, buffer.lengths, gamma=config.gamma, lam=config.lam)
    if config.leave_one_out:
        advantages = losses.leave_one_out(advantages, buffer.valid, buffer.groups)
    valid, advantages, returns = (tensor.flatten() for tensor in (buffer.valid, advantages, returns))
    deciding, tasks = valid & ~forced, buffer.cell_tasks
    n_tasks = len(returns_normalizer.statistics.mean)
    floors = buffer.moved(np.array(config.floors(n_tasks), np.float32))
    standardised = losses.standardise(advantages, deciding, tasks, n_tasks, floors)
    decided = reference.decided & valid.unsqueeze(1)
    old = returns_normalizer.restore(reference.values, tasks)
    # A mask instead of an `if`, which would be a sync: without a selected value the statistics do not change.
    returns_normalizer.update(returns, tasks, valid & reference.accepted & returns.isfinite().all())
    weights = torch.where(deciding, 1.0, config.forced_value_weight) * valid
    weight, decisions = weights.sum(), deciding.sum().clamp(min=1)
    by_head = losses.compute_per_head_advantages(standardised.advantages, decided, centred=config.centred)
    targets, old = (returns_normalizer.normalise(each, tasks) for each in (returns, old))
    reference = reference._replace(values=old)  # a clip compares values and targets in the same units
    counts = (decided.sum(0).clamp(min=1), decisions, weight.where(weight > 0, 1.0))
    scales = (minibatches / count for count in counts)
    return PreparedRound(buffer, reference, by_head, standardised, returns, targets, weights, decisions, *scales)
