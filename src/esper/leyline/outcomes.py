"""Rent and objective, measurements with their error, results of gates, and reports of seeds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from esper.leyline.slots import SeedStage

if TYPE_CHECKING:
    from torch import Tensor

RHO = 2.0  # rent in points per doubling of the host
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


def relative_gain(control_loss: Number | float, loss: Number) -> Number:
    """Gain in points of tasks that are scored by loss: 100 · (control_loss − loss) / control_loss."""
    return 100 * (control_loss - loss) / control_loss


def gain_over(control: Number, score: Number, *, by_loss: bool = False) -> Number:
    """Gain in points of a score over its control's. Scores are accuracies in percent.

    By loss they are `relative_gain(guess, loss)`, percent below the loss of guessing. Then the gain is
    `relative_gain(control_loss, loss)`, in which the loss of guessing cancels.
    """
    return 100 * (score - control) / (100 - control) if by_loss else score - control


class Measurement(NamedTuple):
    """A value and its standard error, in the same unit. A missing measurement is None, never 0."""

    value: float
    error: float

    @property
    def beyond_error(self) -> bool:
        """Whether the value is positive by more than its error."""
        return self.value > self.error


def mean_of(measurements: tuple[Measurement, ...]) -> Measurement | None:
    """Mean of independent measurements with its error; None if there are none."""
    if not measurements:
        return None
    count = len(measurements)
    error = math.sqrt(sum(m.error**2 for m in measurements)) / count
    return Measurement(sum(m.value for m in measurements) / count, error)


class GateResult(NamedTuple):
    """The result of a gate: `score` is the share of its conditions that hold, `reasons` lists the others."""

    passed: bool
    score: float
    reasons: tuple[str, ...] = ()


CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "germinate": "g",
        "advance": "a",
        "fossilize": "f",
        "prune": "p",
        "set_alpha_target": "s",
        "tick": "t",
        "panic": "!",
    }
)
"""Causes of changes of stage: a verb, the timer, or the governor. Logs write the letter."""


@dataclass(frozen=True)
class StageChange:
    """A slot's change from one stage to another."""

    slot_id: str
    source: SeedStage
    target: SeedStage
    cause: str  # one of `CAUSES`


@dataclass(frozen=True)
class SeedReport:
    """One slot as a controller sees it. A value that does not exist or was not measured is None."""

    slot_id: str
    stage: SeedStage
    blueprint: str | None
    style: str | None
    alpha: float
    alpha_target: float
    ramping: bool
    steps_in_stage: int
    age: int  # steps since germination
    cooldown: int  # ticks until the slot is usable again
    parameters: int
    gradient_norm: float | None
    audition: Measurement | None
    """Points that the shadow row has over the main row (mean of the last two measurements)."""
    contribution: Measurement | None
    """Points of accuracy that the main row loses when this seed is silenced (mean of the last two)."""
    germinations: int  # seeds tried in this slot so far
