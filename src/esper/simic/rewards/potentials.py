"""Rent, potentials, and the shaping that telescopes.

    r_t = γ Φ(s_{t+1}) − Φ(s_t) + what the end is worth

With Φ of every terminal state := 0 the discounted sum of the shaping over a segment is −Φ of its first state, whatever
was done in it: nothing can be farmed, and the best policy is that of the end's worth alone (Ng, Harada and Russell,
1999; Grzes, 2017 for the terminal state). Each Φ is measured once, stored and reused.

Everything is float64: hundreds of points that cancel leave nothing of float32.
"""

import torch
from torch import Tensor

from esper.leyline import BadValueError, SeedStage
from esper.tamiyo.signals import Measured

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


def rent(parameters: Tensor, host_parameters: Tensor, rho: float) -> Tensor:
    """ρ · log2(1 + parameters / host's), in points."""
    return rho * torch.log2(1 + parameters.double() / host_parameters.double())


def relative_loss(loss: Tensor, random_guess_loss: float) -> Tensor:
    """A loss in units of the task's random-guess loss: 1 is guessing, for any task."""
    if not random_guess_loss > 0:
        raise BadValueError(f"random_guess_loss {random_guess_loss!r} is not above 0")
    return loss.double() / random_guess_loss


def potential(gain: Tensor, acting_parameters: Tensor, host_parameters: Tensor, rho: float) -> Tensor:
    """Live gain − rent of all seeds with alpha > 0, (N,)."""
    return gain.double() - rent(acting_parameters, host_parameters, rho)


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
