"""What an alarm is, and what a rule that raises one consists of."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from esper.simic.agent import PPOUpdateMetrics
from esper.simic.telemetry.facts import RoundFacts
from esper.simic.telemetry.limits import AlarmLimits

Severity = Literal["info", "warning", "critical"]
Verdict = Literal["bad", "between", "healthy"]
"""*Between*: not bad any more, or not bad enough, but no proof of health either."""


@dataclass(frozen=True)
class Alarm:
    """Something began to be wrong, or ended."""

    kind: str
    severity: Severity
    round: int
    subject: str
    """The head that it is about; empty where it is about the whole"""
    ended: bool
    value: float
    limit: float | None
    cause: str
    """In words, with value and limit"""
    remedy: str

    def __str__(self) -> str:
        return f"round {self.round}: {self.kind}: {self.cause}" + (f"; {self.remedy}" if self.remedy else "")


class Sight(NamedTuple):
    """All that a rule looks at."""

    metrics: PPOUpdateMetrics
    facts: RoundFacts
    limits: AlarmLimits
    drift: float | None
    """Of the gradient norm; None where there is nothing to compare with"""
    clip_norm: float
    """What gradients are clipped to: the unit of their limits"""


class Reading(NamedTuple):
    """One quantity against its limit."""

    verdict: Verdict
    value: float
    limit: float | None
    """None where there is no number for it"""
    what: str
    """The quantity's name in a sentence"""
    subject: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Rule:
    """One kind of alarm."""

    kind: str
    severity: Severity
    when: str
    """In words, with the names of limits in braces"""
    remedy: str
    read: Callable[[Sight], Iterable[Reading]]
    """No reading: not measured in this round"""
    patience: str | None = None
    """The limit that says how many rounds running it must be bad; None: one"""

    def rounds(self, limits: AlarmLimits) -> int:
        """So many rounds running raise it."""
        return int(getattr(limits, self.patience)) if self.patience else 1

    def describe(self, limits: AlarmLimits) -> str:
        """When it is raised, under these limits."""
        numbers = {name: value if isinstance(value, tuple) else f"{value:g}" for name, value in asdict(limits).items()}
        rounds = self.rounds(limits)
        return self.when.format(**numbers) + (f", {rounds} rounds running" if rounds > 1 else "")


def above(value: float, limit: float, band: float) -> Verdict:
    """Too much is bad; healthy again below limit / band."""
    return "bad" if value > limit else "healthy" if value <= limit / band else "between"


def below(value: float, limit: float, band: float) -> Verdict:
    """Too little is bad; healthy again above limit · band, or, of a negative limit, limit / band."""
    clear = limit * band if limit > 0 else limit / band
    return "bad" if value < limit else "healthy" if value >= clear else "between"
