"""When an alarm is raised. The defaults were set beside 465 healthy rounds of 25 runs (docs/telemetry.md)."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Literal, NamedTuple

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive, require_share, require_whole
from esper.simic.agent import PPOUpdateMetrics
from esper.simic.telemetry.gradients import GradientReport
from esper.simic.telemetry.lstm import LstmHealth
from esper.simic.telemetry.ratios import RatioReport


@dataclass(frozen=True)
class AlarmLimits:
    """Limits of all alarms; one that is not wanted gets a limit that nothing reaches."""

    ratio_high: float = 40.0
    """Joint probability ratio above which an action's probability has exploded; healthy rounds reach 13."""
    ratio_low: float = 1e-3
    """Joint ratio below which it has vanished; healthy rounds reach 0.008."""
    value_loss: float = 10.0
    """Of the critic, in units of the returns' variance so far; where a policy begins to earn, 3.8 is healthy."""
    explained_variance: float = -1.0
    """Below it the critic misleads …"""
    value_patience: int = 3
    """… if it lasts so many rounds. (In a single round with hardly any variance the figure means little.)"""
    kl_spike: float = 0.18
    """Joint KL of a minibatch; updates stop at 0.045, and one that did may show 0.12."""
    kl_extreme: float = 0.5
    entropy: float = 0.02
    """Normalised entropy of a head's own choices, of steps that gave it one."""
    entropy_by_head: tuple[tuple[str, float], ...] = ()
    """(head, entropy) where another limit holds."""
    entropy_patience: int = 3
    """Rounds running."""
    gradient_low: float = 2e-3
    """Global norm before clipping, in units of the norm that gradients are clipped to."""
    head_gradient_low: float = 2e-6
    """Norm of a head's own weights, of a head that had something to learn, in the same units."""
    gradient_patience: int = 2
    """Rounds running for gradients that vanish."""
    gradient_high: float = 200.0
    """Global norm before clipping, in the same units."""
    drift: float = 2.4
    """Times that the norm of the heads' gradients, before clipping, differs from its exponential mean, up or down …"""
    drift_patience: int = 3
    """… for so many rounds: healthy runs reach 4.1 in one round, 2.7 in two running and 2.2 in three, while they begin
    to learn; a lasting factor of 3 on a steady norm shows as 3.0, 2.8 and 2.7 in a run of any age. (The *largest* norm
    of an update is no measure of drift: in healthy runs it is 3.3 times the usual for three rounds, as single
    minibatches surprise a good critic.)"""
    drift_momentum: float = 0.95
    drift_warmup: int = 5
    """Rounds before anything counts as what the norm used to be."""
    lstm_rms: float = 10.0
    """Of the cell."""
    lstm_saturated: float = 0.5
    """Share of hidden numbers at their end."""
    lstm_dead: float = 0.5
    """Share of units that are silent in every env."""
    behaviour_gap: float = 1e-3
    """Log-prob at collection against the update's; above 1e-2 the update refuses the round."""
    commits: float = 0.05
    """Share of episodes with a committed seed …"""
    germinations: float = 0.5
    """… where so many seeds are germinated per episode …"""
    commits_patience: int = 3
    """… rounds running."""
    suspects: float = 0.25
    """Share of measured, acting seeds (counted per step) that are suspected …"""
    suspects_least: int = 5
    """… if they are at least so many."""
    panics: float = 0.1
    """Governor's panics per episode."""
    band: float = 1.5
    """An alarm is over only beyond its limit by this factor …"""
    calm: int = 3
    """… for so many rounds running."""

    def __post_init__(self) -> None:
        signed = {"explained_variance", "entropy_by_head"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                require_whole(field.name, value, 1)
            elif field.name not in signed:
                require_positive(field.name, value)
        for name in ("lstm_saturated", "lstm_dead", "suspects", "commits"):
            require_share(name, getattr(self, name))
        for pair in (("ratio_low", "ratio_high"), ("kl_spike", "kl_extreme"), ("gradient_low", "gradient_high")):
            low, high = (getattr(self, name) for name in pair)
            if not low < high:
                raise BadValueError(f"{pair[0]} {low} is not below {pair[1]} {high}")
        if self.explained_variance >= 0:
            raise BadValueError(f"explained_variance {self.explained_variance}: a useless critic has 0; give less")
        if self.band <= 1 or self.drift <= 1:
            raise BadValueError(f"band {self.band} and drift {self.drift} are factors; they must exceed 1")
        if self.drift_momentum >= 1:
            raise BadValueError(f"drift_momentum {self.drift_momentum} is not below 1")
        for head, entropy in self.entropy_by_head:
            require_positive(f"entropy of head {head!r}", entropy)

    def entropy_of(self, head: str) -> float:
        """The limit of a head."""
        return dict(self.entropy_by_head).get(head, self.entropy)


@dataclass(frozen=True)
class RoundFacts:
    """Counts over a round's episodes. What was not measured is None, and raises no alarm and ends none."""

    episodes: int | None = None
    committed: int | None = None
    """Episodes with a committed seed"""
    germinated: int | None = None
    """Seeds"""
    panics: int | None = None
    """Of the governor"""
    acting: int | None = None
    """Acting seeds with a measured contribution, counted in every step; of these are …"""
    hacking: int | None = None
    """… suspected of reward hacking"""
    ransomware: int | None = None
    """… suspected of ransomware (`esper.simic.rewards.detect`)"""
    worst_hacking: str = ""
    """The worst of them, in words"""
    worst_ransomware: str = ""
    lstm: LstmHealth | None = None
    """In mid-episode"""
    gradients: GradientReport | None = None
    ratios: RatioReport | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, LstmHealth | GradientReport | RatioReport | str):
                require_whole(field.name, value, 0)
        if self.committed is not None and self.committed > (self.episodes or 0):
            raise BadValueError(f"{self.committed} committed of {self.episodes} episodes; give both")
        if (self.hacking or 0) + (self.ransomware or 0) > (self.acting or 0):
            raise BadValueError(
                f"{self.hacking} hacking and {self.ransomware} ransomware of {self.acting} acting seeds"
            )

    def per_episode(self, count: int | None) -> float | None:
        """A count over the number of episodes, where both are known."""
        return count / self.episodes if count is not None and self.episodes else None


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
