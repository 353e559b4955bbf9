"""The inputs of a reward, its parts, and the potentials that shape it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError, SeedStage, objective
from esper.tamiyo.signals import Measured, SlotView

SHAPING = "shaping"
"""Name of the part that telescopes away; every other part is earned or paid for good."""


class RewardInputs(NamedTuple):
    """One step s → s' of every env, (N,) unless something else is said; accuracies and gains in points.

    In a panic nothing is read of s' (which the host never reached healthily): such rows may hold anything, NaN too.
    """

    potential: Tensor
    """Φ(s) as the step before returned it; 0 at the start of an episode"""
    op: Tensor
    """long: what was executed in s; WAIT where nothing was"""
    slot: Tensor
    """long: where"""
    before: SlotView
    """s; steps and ages count steps"""
    after: SlotView
    """s'"""
    seed_parameters: Tensor
    """(N, S) parameters of the seed that each slot held in s; 0 where there was none"""
    gain: Tensor
    """Of the live host in s'"""
    control_accuracy: Tensor
    chance_accuracy: Tensor
    loss: Tensor
    """Validation loss of the live host in s', in units of the random-guess loss"""
    acting_parameters: Tensor
    """Of all seeds with alpha > 0 in s'; of s in a panic"""
    fossil_parameters: Tensor
    host_parameters: Tensor
    terminal: Tensor
    """bool: s' is the end of the episode"""
    objective_gain: Tensor
    """Of the hardened host, on the same images; read where terminal"""
    objective_loss: Tensor
    """Of the hardened host, in units of the random-guess loss; read where terminal"""
    panic: Tensor
    """bool: training on the way to s' failed, and the host was sent back to s"""


@dataclass(frozen=True)
class RewardBreakdown:
    """What a reward is made of."""

    parts: Mapping[str, Tensor]
    """(N,) each"""

    @property
    def total(self) -> Tensor:
        """(N,) the sum of the parts, in their order."""
        return _sum(self.parts.values())

    @property
    def shaped_share(self) -> Tensor:
        """(N,) shaping's share of all that was paid, by size: in [0, 1]; 0 where nothing was paid at all."""
        sizes = _sum(part.abs() for part in self.parts.values())
        return torch.where(sizes > 0, self.parts[SHAPING].abs() / torch.where(sizes > 0, sizes, 1.0), 0.0)


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


class Rewarded(NamedTuple):
    """A reward, and what to keep for the next."""

    breakdown: RewardBreakdown
    potential: Tensor
    """(N,) Φ(s') to hand in with the next step: 0 after an episode, Φ(s) after a panic"""
    levels: Mapping[str, Tensor]
    """(N,) each: what Φ(s') is made of, to be looked at (meaningless after a panic or an end)"""

    @property
    def total(self) -> Tensor:
        """(N,)"""
        return self.breakdown.total


STAGE_POTENTIALS: dict[SeedStage, float] = {
    SeedStage.DORMANT: 0.0,
    SeedStage.GERMINATED: 1.0,
    SeedStage.TRAINING: 2.0,
    SeedStage.BLENDING: 3.5,
    SeedStage.HOLDING: 5.5,
    SeedStage.FOSSILIZED: 6.0,
    SeedStage.PRUNED: 0.0,
    SeedStage.EMBARGOED: 0.0,
    SeedStage.RESETTING: 0.0,
}


def relative_loss(loss: Tensor, random_guess_loss: float) -> Tensor:
    """A loss in units of the task's random-guess loss: 1 is guessing, for any task."""
    if not random_guess_loss > 0:
        raise BadValueError(f"random_guess_loss {random_guess_loss!r} is not above 0")
    return loss.double() / random_guess_loss


def potential(gain: Tensor, acting_parameters: Tensor, host_parameters: Tensor, rho: float) -> Tensor:
    """Live gain − rent of all seeds with alpha > 0, (N,)."""
    return objective(gain.double(), acting_parameters.double(), host_parameters.double(), rho)


def shaping(before: Tensor, after: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """γ Φ(s') − Φ(s), with Φ(s') := 0 where the segment ends."""
    return gamma * torch.where(ends, 0.0, after.double()) - before.double()


def carried(before: Tensor, after: Tensor, terminal: Tensor, panic: Tensor) -> Tensor:
    """The Φ that the next step starts from: 0 after an episode, Φ(s) where a panic led back to s."""
    return torch.where(terminal, 0.0, torch.where(panic, before.double(), after.double()))


def stage_potential(stage: Tensor) -> Tensor:
    """Sum of the stages' potentials over **all** slots, (N, S) → (N,); it never falls on the way to a fossil."""
    table = torch.tensor([STAGE_POTENTIALS[s] for s in SeedStage], dtype=torch.float64, device=stage.device)
    return table[stage].sum(-1)


def is_measured(contribution: Measured, alpha: Tensor) -> Tensor:
    """(N, S): a silent seed (alpha 0) has no contribution, whatever was written down."""
    return contribution.valid & (alpha > 0)


def credit(contribution: Measured, alpha: Tensor, gain: Tensor) -> Tensor:
    """Points that each seed is credited with, (N, S).

    Contributions, scaled down together where they claim more than the host has gained on its control: dependence is no
    merit, and neither is the host's own drift. Harm is charged in full. Silent or unmeasured seeds get nothing.
    """
    points = torch.where(is_measured(contribution, alpha), contribution.value.double(), 0.0)
    claims = points.clamp_min(0)
    claimed, earned = claims.sum(-1, keepdim=True), gain.double().clamp_min(0).unsqueeze(-1)
    share = torch.where(claimed > earned, earned / torch.where(claimed > 0, claimed, 1.0), 1.0)
    return claims * share + points.clamp_max(0)


def unexplained(contribution: Measured, alpha: Tensor, gain: Tensor) -> Tensor:
    """Gain that measured contributions leave to acting seeds without one, (N,); 0 where there is no such seed."""
    unmeasured = (alpha > 0) & ~contribution.valid
    explained = credit(contribution, alpha, gain).clamp_min(0).sum(-1)
    return torch.where(unmeasured.any(-1), (gain.double() - explained).clamp_min(0), 0.0)
