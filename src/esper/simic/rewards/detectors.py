"""Detectors of seeds that look better than they are, for every step with an acting seed.

*Hacking*: the host leans on a seed far more than it has gained. *Ransomware*: it would lose much without the seed, and
has gained nothing on its control by having it. Pure functions; the trainer turns findings into events.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from esper.simic.rewards.config import DetectorLimits
from esper.simic.rewards.potentials import is_measured
from esper.tamiyo.signals import SlotView

Suspicion = Literal["hacking", "ransomware"]
Severity = Literal["warning", "critical"]
SEVERITY: dict[Suspicion, Severity] = {"hacking": "warning", "ransomware": "critical"}


class Suspects(NamedTuple):
    """Which seeds are suspicious, (N, S) bool; none is both."""

    hacking: Tensor
    ransomware: Tensor


@dataclass(frozen=True)
class Finding:
    """One suspicious seed."""

    env: int
    slot: int
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


def findings(suspects: Suspects, slots: SlotView, gain: Tensor) -> tuple[Finding, ...]:
    """The suspects as records, by env and slot. Host sync: a few, none of them per env."""
    found = []
    names: tuple[Suspicion, ...] = ("hacking", "ransomware")
    for name, flags in zip(names, suspects, strict=True):
        places = flags.nonzero()
        if len(places) == 0:
            continue
        values = slots.contribution.value[flags].tolist()
        gains = gain[places[:, 0]].tolist()
        for (env, slot), value, gained in zip(places.tolist(), values, gains, strict=True):
            found.append(Finding(env, slot, name, SEVERITY[name], value, gained))
    return tuple(sorted(found, key=lambda finding: (finding.env, finding.slot)))
