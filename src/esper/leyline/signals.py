"""What a decision may look at, as plain values."""

from dataclasses import dataclass

from esper.leyline.outcomes import Measurement
from esper.leyline.stages import SeedStage


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
