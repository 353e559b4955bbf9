"""Detectors of seeds that look better than they are, for every step with an acting seed.

*Hacking*: the host leans on a seed far more than it has gained. *Ransomware*: it would lose much without the seed, and
has gained nothing on its control by having it. Pure functions; the log of a run has an event for every finding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper.simic.rewards.config import DetectorLimits
from esper.simic.rewards.potentials import is_measured
from esper.tamiyo.signals import SlotView

Suspicion = Literal["hacking", "ransomware"]
Severity = Literal["warning", "critical"]
SEVERITY: dict[Suspicion, Severity] = {"hacking": "warning", "ransomware": "critical"}


class Suspects(NamedTuple):
    """Which seeds are suspicious, (N, S) bool, or (T, N, S) over an episode; none is both in one step."""

    hacking: Tensor
    ransomware: Tensor

    @staticmethod
    def over(steps: "Sequence[Suspects]") -> "Suspects":
        """Of an episode, (T, N, S)."""
        return Suspects(*(torch.stack(flags) for flags in zip(*steps, strict=True)))


@dataclass(frozen=True)
class Finding:
    """A seed that became suspicious."""

    step: int
    env: int
    slot: str
    suspicion: Suspicion
    severity: Severity
    contribution: float
    """Points that the host would lose without it"""
    gain: float
    """Points that the host has over its control"""


def detect(slots: SlotView, gain: Tensor, limits: DetectorLimits) -> Suspects:
    """Judge the measured seeds of hosts with this gain, (N,). A contribution within its own error proves nothing."""
    contribution, gained = slots.contribution, gain.unsqueeze(-1)
    leans = contribution.value >= limits.contribution
    large = is_measured(contribution, slots.alpha) & leans & (contribution.value > contribution.error)
    ransomware = large & (gained <= 0)
    hacking = large & (gained > 0) & (contribution.value >= limits.ratio * gained)
    return Suspects(hacking, ransomware)


def findings(
    suspects: Suspects, germinations: Tensor, contribution: Tensor, gain: Tensor, slot_ids: Sequence[str]
) -> tuple[Finding, ...]:
    """The suspects of an episode by step, env and slot: one per seed and suspicion, at the first such step.
    `germinations` (T, N, S): how many seeds a slot has had, `contribution` (T, N, S), `gain` (T, N).
    Host sync: a few, none of them per env or step."""
    found = []
    names: tuple[Suspicion, ...] = ("hacking", "ransomware")
    for name, flags in zip(names, suspects, strict=True):
        first = flags & (_counted_by_seed(flags, germinations) == 1)
        places = first.nonzero()
        values, gains = contribution[first].tolist(), gain[places[:, 0], places[:, 1]].tolist()
        for (step, env, slot), value, gained in zip(places.tolist(), values, gains, strict=True):
            found.append(Finding(step, env, slot_ids[slot], name, SEVERITY[name], value, gained))
    return tuple(sorted(found, key=lambda finding: (finding.step, finding.env, finding.slot)))


def _counted_by_seed(flags: Tensor, germinations: Tensor) -> Tensor:
    """(T, N, S): flags so far of the seed that is in the slot. Ages would not tell seeds apart: a host that is put back
    after a panic has the same age twice."""
    so_far = flags.cumsum(0)
    another = torch.ones_like(flags)
    another[1:] = germinations[1:] != germinations[:-1]
    # What was counted before the last change: counts never fall, so the largest is the last.
    before = torch.where(another, so_far - flags.long(), 0).cummax(0).values
    return so_far - before
