"""What a reward is computed from, and what comes out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from esper.tamiyo.signals import SlotView

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
