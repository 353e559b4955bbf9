"""The inputs of a reward, its parts, and the potentials that shape it."""

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError, SeedStage
from esper.tamiyo.signals import Measured, SlotView

SHAPING = "shaping"
"""Name of the part that telescopes away; all other parts are final."""


class RewardInputs(NamedTuple):
    """One step s → s' of every env, (N,) unless stated otherwise; accuracies and gains in points.

    In a panic nothing of s' is read, because the host never reached it: such rows may hold anything, including NaN.
    """

    potential: Tensor
    """Φ(s) as the previous step returned it; 0 at the start of an episode"""
    op: Tensor
    """long: what was executed in s; WAIT if nothing was"""
    slot: Tensor
    """long: where"""
    before: SlotView
    """s; steps and ages count steps"""
    after: SlotView
    """s'"""
    seed_parameters: Tensor
    """(N, S) parameters of the seed that each slot held in s, or 0"""
    gain: Tensor
    """Of the live host in s'"""
    control_accuracy: Tensor
    chance_accuracy: Tensor
    loss: Tensor
    """Validation loss of the live host in s', in units of the random-guess loss"""
    acting_parameters: Tensor
    """Of all seeds with alpha > 0 in s'; in s after a panic"""
    fossil_parameters: Tensor
    host_parameters: Tensor
    terminal: Tensor
    """bool: s' is the end of the episode"""
    objective_gain: Tensor
    """Of the hardened host, on the same images; read where terminal"""
    objective_loss: Tensor
    """Of the hardened host, in units of the random-guess loss; read where terminal"""
    panic: Tensor
    """bool: training on the way to s' failed, and the host was restored to s"""


class Rewarded(NamedTuple):
    """A reward and its parts, and the potential for the next one."""

    parts: Mapping[str, Tensor]
    """(N,) each"""
    potential: Tensor
    """(N,) Φ(s') to pass to the next step: 0 after an episode, Φ(s) after a panic"""
    levels: Mapping[str, Tensor]
    """(N,) each: the terms of Φ(s'); meaningless after a panic or an end"""

    @property
    def total(self) -> Tensor:
        """(N,) the sum of the parts, in their order."""
        return reduce(torch.add, self.parts.values())

    @property
    def shaped_share(self) -> Tensor:
        """(N,) absolute shaping over the sum of absolute parts, in [0, 1]; 0 if all parts are 0."""
        sizes = reduce(torch.add, (part.abs() for part in self.parts.values()))
        return torch.where(sizes > 0, self.parts[SHAPING].abs() / torch.where(sizes > 0, sizes, 1.0), 0.0)


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
    """A loss in units of the task's random-guess loss."""
    if not random_guess_loss > 0:
        raise BadValueError(f"random_guess_loss {random_guess_loss!r} is not above 0")
    return loss.double() / random_guess_loss


def shaping(before: Tensor, after: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """γ Φ(s') − Φ(s), with Φ(s') := 0 where the segment ends."""
    return gamma * torch.where(ends, 0.0, after.double()) - before.double()


def stage_potential(stage: Tensor) -> Tensor:
    """Sum of the stages' potentials over **all** slots, (N, S) → (N,); it never falls on the way to a fossil."""
    table = torch.tensor([STAGE_POTENTIALS[s] for s in SeedStage], dtype=torch.float64, device=stage.device)
    return table[stage].sum(-1)


def is_measured(contribution: Measured, alpha: Tensor) -> Tensor:
    """(N, S): whether a contribution counts. A silent seed (alpha 0) has none, whatever was recorded."""
    return contribution.valid & (alpha > 0)


def measured_points(slots: SlotView) -> Tensor:
    """Measured contributions, (N, S); 0 where there is none."""
    return torch.where(is_measured(slots.contribution, slots.alpha), slots.contribution.value.double(), 0.0)


def credit(slots: SlotView, gain: Tensor) -> Tensor:
    """Points that each seed is credited with, (N, S).

    Contributions that add up to more than the gain over the control are scaled down to it: neither dependence nor the
    host's own progress earns credit. Harm is charged in full. Silent or unmeasured seeds get nothing.
    """
    points = measured_points(slots)
    claims = points.clamp_min(0)
    claimed, earned = claims.sum(-1, keepdim=True), gain.double().clamp_min(0).unsqueeze(-1)
    share = torch.where(claimed > earned, earned / torch.where(claimed > 0, claimed, 1.0), 1.0)
    return claims * share + points.clamp_max(0)


def unexplained(slots: SlotView, gain: Tensor) -> Tensor:
    """Gain that measured contributions leave to acting but unmeasured seeds, (N,); 0 without such a seed."""
    unmeasured = (slots.alpha > 0) & ~slots.contribution.valid
    explained = credit(slots, gain).clamp_min(0).sum(-1)
    return torch.where(unmeasured.any(-1), (gain.double() - explained).clamp_min(0), 0.0)
