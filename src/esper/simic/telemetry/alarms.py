"""Alarms: their thresholds, the facts of a round, readings with a verdict, and the record of an alarm."""

import math
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from esper.leyline import BadValueError
from esper.simic.telemetry.examination import RatioReport
from esper.simic.telemetry.measurements import GradientReport, LstmHealth

Severity = Literal["info", "warning", "critical"]
Verdict = Literal["bad", "between", "healthy"]
"""*between* neither raises an alarm nor helps to end it."""

BAND = 1.5
"""Factor beyond its threshold at which a quantity is healthy again."""


@dataclass(frozen=True)
class AlarmLimits:
    """Thresholds of the alarms. Infinity disables an alarm; minus infinity, where low values raise it."""

    ratio_high: float = 40.0
    """Joint probability ratio above which it has exploded. Healthy rounds reach 13."""
    ratio_low: float = 1e-3
    """Joint probability ratio below which it has vanished. Healthy rounds reach 0.008."""
    kl_spike: float = 0.18
    """Joint KL of a minibatch. Updates stop at 0.045; healthy rounds reach 0.12."""
    kl_extreme: float = 0.5
    """Joint KL above which the alarm is critical."""
    entropy: float = 0.02
    """Lowest normalised entropy of a head, over the steps that gave it a choice."""
    value_loss: float = 10.0
    """Value loss in units of the returns' variance. Healthy rounds reach 3.8."""
    explained_variance: float = -1.0
    """Lowest explained variance of the critic."""
    gradient_high: float = 200.0
    """Global gradient norm before clipping, in units of the clip norm."""
    drift: float = 2.4
    """Factor between the norm of the heads' gradients and its exponential mean. Healthy runs reach 2.2 three rounds
    running."""
    lstm_rms: float = 10.0
    """Root mean square of the LSTM's cells."""
    behaviour_gap: float = 1e-3
    """Difference of log-probabilities between collection and update; above 0.01 the update refuses the round."""
    commits: float = 0.05
    """Lowest share of episodes with a committed seed, where seeds are germinated at all."""
    suspects: float = 0.25
    """Share of acting seeds that are suspects."""
    panics: float = 0.1
    """Panics of the governor per episode."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
                raise BadValueError(f"{name} {value!r} is not a number")
        for low, high in (("ratio_low", "ratio_high"), ("kl_spike", "kl_extreme")):
            if getattr(self, low) > getattr(self, high):
                raise BadValueError(f"{low} {getattr(self, low)} is above {high} {getattr(self, high)}")
        if self.explained_variance >= 0:
            raise BadValueError(
                f"explained_variance {self.explained_variance} is not below 0, that of a useless critic"
            )
        if self.drift <= 1:
            raise BadValueError(f"drift {self.drift} is a factor; it must exceed 1")


@dataclass(frozen=True)
class RoundFacts:
    """Counts over a round's episodes. None means not measured, which neither raises nor ends an alarm."""

    episodes: int | None = None
    committed: int | None = None
    """Episodes with a committed seed"""
    germinated: int | None = None
    """Seeds"""
    panics: int | None = None
    acting: int | None = None
    """Acting seeds with a measured contribution, counted in every step"""
    hacking: int | None = None
    """Those suspected of reward hacking"""
    ransomware: int | None = None
    """Those suspected of ransomware (`esper.simic.rewards.detect`)"""
    worst_hacking: str = ""
    """Description of the worst suspect"""
    worst_ransomware: str = ""
    lstm: LstmHealth | None = None
    """In the middle of the episodes"""
    gradients: GradientReport | None = None
    ratios: RatioReport | None = None

    def per_episode(self, count: int | None) -> float | None:
        """A count divided by the number of episodes, if both are known."""
        return count / self.episodes if count is not None and self.episodes else None


@dataclass(frozen=True)
class Alarm:
    """The beginning or the end of a problem."""

    kind: str
    severity: Severity
    round: int
    subject: str
    """The head or the part of the LSTM; empty if the alarm is about the whole"""
    ended: bool
    value: float
    limit: float | None
    cause: str
    """A sentence with value and limit"""
    remedy: str

    def __str__(self) -> str:
        return f"round {self.round}: {self.kind}: {self.cause}" + (f"; {self.remedy}" if self.remedy else "")


class Reading(NamedTuple):
    """One quantity and its verdict."""

    quantity: str
    verdict: Verdict
    value: float
    limit: float | None
    subject: str = ""
    remark: str = ""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" (limit {self.limit:.3g})"
        return f"the {self.quantity} is {self.value:.3g}{limit}"


def above(quantity: str, value: float | None, limit: float, subject: str = "", remark: str = "") -> list[Reading]:
    """A reading that is bad above the limit and healthy up to limit / BAND."""
    if value is None or math.isnan(value):
        return []
    verdict: Verdict = "bad" if value > limit else "healthy" if value <= limit / BAND else "between"
    return [Reading(quantity, verdict, value, limit, subject, remark)]


def below(quantity: str, value: float | None, limit: float, subject: str = "", remark: str = "") -> list[Reading]:
    """A reading that is bad below the limit and healthy above it by a factor of BAND."""
    if value is None or math.isnan(value):
        return []
    healthy = limit * BAND if limit > 0 else limit / BAND
    verdict: Verdict = "bad" if value < limit else "healthy" if value >= healthy else "between"
    return [Reading(quantity, verdict, value, limit, subject, remark)]


def flag(quantity: str, bad: bool, value: float, limit: float | None, remark: str = "") -> list[Reading]:
    """A reading whose verdict does not follow from its value alone."""
    return [Reading(quantity, "bad" if bad else "healthy", value, limit, remark=remark)]
