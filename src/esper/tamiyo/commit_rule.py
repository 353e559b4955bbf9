"""The rule of preset `commit`: which seeds advance, are committed or are pruned, in all slots at once.

    ADVANCE     TRAINING for long enough, and the audition is not clearly negative
    PRUNE       TRAINING for too long with a clearly negative audition
    FOSSILIZE   HOLDING for long enough, and the contribution exceeds its rent by a margin
    PRUNE       HOLDING for long enough otherwise

A policy under this preset decides whether, what and where to germinate. A bad seed costs a trial and nothing else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import RHO, BadValueError, LifecycleOp, SeedStage, rent
from esper.leyline.numbers import require_whole
from esper.tamiyo.signals import TrainingSignals


@dataclass(frozen=True)
class CommitRule:
    """Thresholds of the rule. Times are in steps, values in points."""

    training_steps: int = 2
    """Steps in TRAINING before an audition counts."""
    trial: int = 6
    """Steps in TRAINING after which a seed with a bad audition is pruned."""
    errors: float = 1.0
    """Standard errors below zero at which an audition counts as bad."""
    holding_steps: int = 1
    """Steps in HOLDING before a contribution counts."""
    margin: float = 0.0
    """Points by which a contribution must exceed its rent."""

    def __post_init__(self) -> None:
        for name in ("training_steps", "trial", "holding_steps"):
            require_whole(name, getattr(self, name), 0)
        if self.errors < 0:
            raise BadValueError(f"errors {self.errors!r} is below 0")

    def ops(self, signals: TrainingSignals) -> Tensor:
        """(N, S) long: the op for every slot, WAIT for most. All are legal. No device sync."""
        slots = signals.slots
        training, holding = slots.stage == SeedStage.TRAINING, slots.stage == SeedStage.HOLDING
        audition, contribution = slots.audition, slots.contribution
        bad = audition.value < -self.errors * audition.error
        auditioned = training & audition.valid & (slots.steps_in_stage >= self.training_steps)
        cost = signals.offers.cost.gather(-1, slots.blueprint.clamp(min=0)[..., None]).squeeze(-1)
        pays = contribution.value - rent(cost, 1.0, RHO) > self.margin
        judged = holding & contribution.valid & (slots.steps_in_stage >= self.holding_steps)
        ops = torch.full_like(slots.stage, LifecycleOp.WAIT)
        failed = (auditioned & bad & (slots.steps_in_stage >= self.trial)) | (judged & ~pays)
        for op, wanted in (
            (LifecycleOp.ADVANCE, auditioned & ~bad & slots.can_advance),
            (LifecycleOp.FOSSILIZE, judged & pays & slots.can_fossilize),
            (LifecycleOp.PRUNE, failed & slots.can_prune),
        ):
            ops = ops.masked_fill(wanted & ~slots.ramping, op)
        return ops
