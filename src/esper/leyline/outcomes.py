"""What came of something: measurements with their error, verdicts of gates, changes of stage, ends of episodes."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from esper.leyline.stages import SeedStage

if TYPE_CHECKING:
    from torch import Tensor

RHO = 2.0
"""Rent in points per doubling of the host"""
OTHER_RHOS = (1.0, 4.0)
"""Other rents at which an evaluation scores its hosts, to show whether a ranking depends on the price"""

Number = TypeVar("Number", float, "Tensor")


def rent(added: Number, host: Number | float, rho: float = RHO) -> Number:
    """ρ · log2(1 + added parameters / host parameters), in points."""
    growth = 1 + added / host
    return rho * (math.log2(growth) if isinstance(growth, float) else growth.log2())


def objective(gain: Number, added: Number, host: Number | float, rho: float = RHO) -> Number:
    """Gain minus rent, in points."""
    return gain - rent(added, host, rho)


class Measurement(NamedTuple):
    """A measured value and its standard error, in the same unit. What was not measured is None, never 0."""

    value: float
    error: float

    @property
    def beyond_error(self) -> bool:
        """Positive by more than its own error."""
        return self.value > self.error


def mean_of(measurements: tuple[Measurement, ...]) -> Measurement | None:
    """Mean of independent measurements, error propagated; None where there is none."""
    if not measurements:
        return None
    count = len(measurements)
    error = math.sqrt(sum(m.error**2 for m in measurements)) / count
    return Measurement(sum(m.value for m in measurements) / count, error)


class GateResult(NamedTuple):
    """A gate's verdict; `score` in [0, 1] says how far the conditions are met, `reasons` what is missing."""

    passed: bool
    score: float
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageChange:
    """A slot went from one stage to another."""

    slot_id: str
    source: SeedStage
    target: SeedStage
    cause: str
    """The verb or timer behind it: germinate, advance, tick, prune …"""


@dataclass(frozen=True)
class SeedReport:
    """One slot as a controller sees it; None where a value does not exist or was not measured."""

    slot_id: str
    stage: SeedStage
    blueprint: str | None
    style: str | None
    alpha: float
    alpha_target: float
    ramping: bool
    steps_in_stage: int
    age: int
    """Steps since germination."""
    cooldown: int
    """Ticks until the slot is usable again."""
    parameters: int
    gradient_norm: float | None
    audition: Measurement | None
    """Points of accuracy that the shadow row has over the main row (mean of the last two measurements)."""
    contribution: Measurement | None
    """Points of accuracy that the main row loses when this seed is silenced (mean of the last two)."""
    germinations: int
    """Seeds tried in this slot so far."""


@dataclass(frozen=True)
class HostSignals:
    """One host after a step: where it stands and what its slots hold."""

    step: int
    total_steps: int
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    """Percent, with statistics calibrated for the main row."""
    deployed_accuracy: float
    """Percent, with the running statistics."""
    host_parameters: int
    grown_parameters: int
    seeds: tuple[SeedReport, ...]
