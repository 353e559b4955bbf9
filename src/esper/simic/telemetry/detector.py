"""Begins and ends alarms by the table of rules, and raises the level of detail after one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive
from esper.simic.agent import PPOConfig, PPOUpdateMetrics
from esper.simic.telemetry.alarms import Alarm, AlarmLimits, Reading, RoundFacts
from esper.simic.telemetry.rules import GRADIENT_LOW, RULES, Evidence, Rule

CALM = 3
"""Healthy rounds running that end an alarm."""
DRIFT_MOMENTUM = 0.95
DRIFT_WARMUP = 5
"""Rounds before a gradient norm has a usual value."""


@dataclass(frozen=True)
class DriftState:
    """State of a tracker, for a checkpoint."""

    log_mean: float = 0.0
    """Exponential mean of ln(norm)"""
    count: int = 0


class GradientEMATracker:
    """Compares a norm with its exponential mean, taken over logarithms so that a burst does not set the scale.

    The k-th norm weighs max(1/k, 1 − momentum), so that the initial value has no pull. A doubtful norm always weighs
    1 − momentum; otherwise the mean of a young run would follow a drift before it is recognised.
    """

    def __init__(self, momentum: float = DRIFT_MOMENTUM, state: DriftState | None = None) -> None:
        if not 0 <= momentum < 1:
            raise BadValueError(f"momentum {momentum!r} is not in [0, 1)")
        self.momentum = momentum
        self.state = state if state is not None else DriftState()

    def observe(self, norm: float, doubtful: float = math.inf) -> float:
        """The factor (1 or more) between the norm and its mean so far; then include the norm in the mean.

        A norm is doubtful if it differs by a factor of more than `doubtful`.
        """
        require_positive("norm", norm, remark="; a norm of 0 or not finite is no drift: check the gradients")
        value, count = math.log(norm), self.state.count + 1
        if count == 1:
            self.state = DriftState(value, 1)
            return 1.0
        gap = value - self.state.log_mean
        drift = math.exp(abs(gap))
        weight = 1 - self.momentum if drift > doubtful else max(1 / count, 1 - self.momentum)
        self.state = DriftState(self.state.log_mean + weight * gap, count)
        return drift


@dataclass(frozen=True)
class AlarmState:
    """One kind of alarm about one subject."""

    kind: str
    subject: str
    bad: int = 0
    """Bad readings running"""
    calm: int = 0
    """Healthy readings running"""
    active: bool = False
    since: int = 0
    """The round in which an active alarm began"""


@dataclass(frozen=True)
class DetectorState:
    """State of a detector, for a checkpoint (`leyline.records.encode` and `decode`)."""

    last_round: int = -1
    drift: DriftState = field(default_factory=DriftState)
    alarms: tuple[AlarmState, ...] = ()


class AnomalyDetector:
    """Judges every update by the rules.

    An alarm begins when its condition has lasted for the rule's patience, and ends after CALM healthy rounds. A round
    without a reading changes nothing.
    """

    def __init__(
        self, limits: AlarmLimits | None = None, state: DetectorState | None = None, ppo: PPOConfig | None = None
    ) -> None:
        """`ppo`: the agent's settings; its clip norm is the unit of gradient norms."""
        self.limits = limits if limits is not None else AlarmLimits()
        self.ppo = ppo if ppo is not None else PPOConfig()
        state = state if state is not None else DetectorState()
        self._last_round = state.last_round
        self._tracker = GradientEMATracker(state=state.drift)
        self._alarms = {(alarm.kind, alarm.subject): alarm for alarm in state.alarms}

    @property
    def state(self) -> DetectorState:
        """Everything that a resumed run needs to raise the same alarms."""
        return DetectorState(self._last_round, self._tracker.state, tuple(self._alarms.values()))

    def look(self, round_index: int, metrics: PPOUpdateMetrics, facts: RoundFacts | None = None) -> tuple[Alarm, ...]:
        """Alarms that begin or end with this round, in the order of the rules."""
        if round_index <= self._last_round:
            raise BadValueError(f"round {round_index} after round {self._last_round}; pass each round once, in order")
        self._last_round = round_index
        facts = facts if facts is not None else RoundFacts()
        evidence = Evidence(metrics, facts, self.limits, self._drift(metrics), self.ppo.clip_norm)
        judged = (self._judge(rule, reading, round_index) for rule in RULES for reading in rule.read(evidence))
        return tuple(alarm for alarm in judged if alarm is not None)

    def _drift(self, metrics: PPOUpdateMetrics) -> float | None:
        """Drift of the norm of the heads' gradients; None during the warm-up or if another alarm is about the norm.

        Each head's norm is a mean over minibatches before clipping, which single minibatches hardly move.
        """
        low, high = GRADIENT_LOW * self.ppo.clip_norm, self.limits.gradient_high * self.ppo.clip_norm
        norm = math.hypot(*(head.grad_norm for head in metrics.heads.values()))
        usable = not metrics.minibatches_not_finite and low <= metrics.pre_clip_grad_norm <= high
        if not usable or not 0 < norm < math.inf:
            return None
        known = self._tracker.state.count >= DRIFT_WARMUP
        drift = self._tracker.observe(norm, self.limits.drift if known else math.inf)
        return drift if known else None

    def _judge(self, rule: Rule, reading: Reading, round_index: int) -> Alarm | None:
        """Count a reading; the alarm that begins or ends with it."""
        key = rule.kind, reading.subject
        alarm = self._alarms.get(key, AlarmState(*key))
        bad = alarm.bad + 1 if reading.verdict == "bad" else 0
        calm = alarm.calm + 1 if reading.verdict == "healthy" else 0
        begins = not alarm.active and bad >= rule.patience
        ends = alarm.active and calm >= CALM
        since, active = round_index if begins else alarm.since, (alarm.active or begins) and not ends
        self._alarms[key] = replace(alarm, bad=bad, calm=calm, active=active, since=since)
        if begins:
            severity, cause, remedy = rule.severity, f"{reading}{reading.remark}{rule.duration}", rule.remedy
        elif ends:
            severity, remedy = "info", ""
            cause = f"over: {reading}, healthy for {CALM} rounds; it began in round {since}"
        else:
            return None
        return Alarm(
            rule.kind, severity, round_index, reading.subject, ends, reading.value, reading.limit, cause, remedy
        )


@dataclass(frozen=True)
class Detail:
    """How many of the coming rounds are examined (`Examination`); part of the checkpoint."""

    rounds: int = 5
    """Rounds to examine after an alarm of severity warning or above."""
    left: int = 0
    """Rounds still to examine"""

    def after(self, alarms: Iterable[Alarm]) -> "Detail":
        """The state after a round with these alarms: started again, or one round less."""
        raised = any(alarm.severity != "info" for alarm in alarms)
        return replace(self, left=self.rounds if raised else max(0, self.left - 1))
