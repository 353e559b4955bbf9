"""How far a gradient norm has drifted from what it used to be."""

import math
from dataclasses import dataclass, field, replace

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive, require_whole
from esper.simic.agent import PPOConfig, PPOUpdateMetrics
from esper.simic.telemetry.alarms import Alarm, AlarmLimits, Reading, RoundFacts, Rule, Sight
from esper.simic.telemetry.rules import RULES


@dataclass(frozen=True)
class DriftState:
    """What a tracker remembers; plain numbers, for a checkpoint."""

    log_mean: float = 0.0
    """Exponential mean of ln(norm)"""
    count: int = 0

    def __post_init__(self) -> None:
        require_whole("count", self.count, 0)
        if not math.isfinite(self.log_mean):
            raise BadValueError(f"log_mean {self.log_mean!r} is not finite")


class GradientEMATracker:
    """Compares a norm with its exponential mean, which is taken over logarithms: norms vary by factors, and one burst
    must not set the scale for long. The k-th value weighs max(1/k, 1 − momentum): no pull of a made-up start. One that
    is in doubt weighs 1 − momentum, or the mean of a young run would have followed a drift before it counts as one."""

    def __init__(self, momentum: float = 0.9, state: DriftState | None = None) -> None:
        if not 0 <= momentum < 1:
            raise BadValueError(f"momentum {momentum!r} is not in [0, 1)")
        self.momentum = momentum
        self.state = state if state is not None else DriftState()

    @property
    def mean(self) -> float | None:
        """What the norm used to be; None before the first."""
        return math.exp(self.state.log_mean) if self.state.count else None

    def observe(self, norm: float, doubtful: float = math.inf) -> float:
        """How many times the norm differs from its mean so far, up or down (1: not at all); then take it in, with the
        least weight if it differs by more than `doubtful` times."""
        require_positive("norm", norm, remark="; what is not finite, or 0, is not drift: look at the gradients")
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
    """The round in which it began, if it is active"""


@dataclass(frozen=True)
class DetectorState:
    """What the detector remembers, for a checkpoint (`leyline.records.encode` and `decode`)."""

    last_round: int = -1
    drift: DriftState = field(default_factory=DriftState)
    alarms: tuple[AlarmState, ...] = ()


class AnomalyDetector:
    """Looks at every update. A condition is reported when it has lasted for its patience, and not again before it has
    been healthy for `calm` rounds, which is reported as its end. A round without a reading changes nothing."""

    def __init__(
        self,
        limits: AlarmLimits | None = None,
        state: DetectorState | None = None,
        ppo: PPOConfig | None = None,
    ) -> None:
        """`ppo`: the settings of the agent that is watched; the norm that it clips gradients to is their unit here."""
        self.limits = limits if limits is not None else AlarmLimits()
        self.ppo = ppo if ppo is not None else PPOConfig()
        state = state if state is not None else DetectorState()
        self._last_round = state.last_round
        self._tracker = GradientEMATracker(self.limits.drift_momentum, state.drift)
        self._alarms = {(watch.kind, watch.subject): watch for watch in state.alarms}

    @property
    def state(self) -> DetectorState:
        """All that a resumed run needs to go on alike."""
        return DetectorState(self._last_round, self._tracker.state, tuple(self._alarms.values()))

    @property
    def active(self) -> tuple[AlarmState, ...]:
        """Alarms that have begun and not ended."""
        return tuple(watch for watch in self._alarms.values() if watch.active)

    def look(self, round_index: int, metrics: PPOUpdateMetrics, facts: RoundFacts | None = None) -> tuple[Alarm, ...]:
        """What begins or ends with this round, in the order of the catalogue."""
        if round_index <= self._last_round:
            raise BadValueError(f"round {round_index} after round {self._last_round}: each is looked at once, in order")
        self._last_round = round_index
        facts = facts if facts is not None else RoundFacts()
        sight = Sight(metrics, facts, self.limits, self._drift(metrics), self.ppo.clip_norm)
        judged = (self._judge(rule, reading, round_index) for rule in RULES for reading in rule.read(sight))
        return tuple(alarm for alarm in judged if alarm is not None)

    def _drift(self, metrics: PPOUpdateMetrics) -> float | None:
        """None as long as nothing is usual yet, and of a round without a norm to compare."""
        norm = self._heads_norm(metrics)
        if norm is None:
            return None
        known = self._tracker.state.count >= self.limits.drift_warmup
        drift = self._tracker.observe(norm, self.limits.drift if known else math.inf)
        return drift if known else None

    def _heads_norm(self, metrics: PPOUpdateMetrics) -> float | None:
        """Of all heads' own gradients. Each head's is a mean over minibatches before clipping: it shows factors up and
        down, where clip factors show none below the clip norm, and one minibatch hardly moves it, as it does the
        largest global norm. None where another alarm is about it: after taking those in, ordinary ones would look like
        drift."""
        low, high = (limit * self.ppo.clip_norm for limit in (self.limits.gradient_low, self.limits.gradient_high))
        if metrics.minibatches_not_finite or not low <= metrics.pre_clip_grad_norm <= high:
            return None
        norm = math.hypot(*(head.grad_norm for head in metrics.heads.values()))
        return norm if 0 < norm < math.inf else None

    def _judge(self, rule: Rule, reading: Reading, round_index: int) -> Alarm | None:
        key = rule.kind, reading.subject
        watch = self._alarms.get(key, AlarmState(*key))
        bad = watch.bad + 1 if reading.verdict == "bad" else 0
        calm = watch.calm + 1 if reading.verdict == "healthy" else 0
        begins = not watch.active and bad >= rule.rounds(self.limits)
        ends = watch.active and calm >= self.limits.calm
        since = round_index if begins else watch.since
        self._alarms[key] = replace(
            watch, bad=bad, calm=calm, active=(watch.active or begins) and not ends, since=since
        )
        if begins:
            return self._begin(rule, reading, round_index)
        if ends:
            return self._end(rule, reading, round_index, since)
        return None

    def _begin(self, rule: Rule, reading: Reading, round_index: int) -> Alarm:
        rounds = rule.rounds(self.limits)
        cause = f"{_state(reading)}{reading.remark}" + (f", {rounds} rounds running" if rounds > 1 else "")
        severity, numbers = rule.severity, (reading.value, reading.limit)
        return Alarm(rule.kind, severity, round_index, reading.subject, False, *numbers, cause, rule.remedy)

    def _end(self, rule: Rule, reading: Reading, round_index: int, since: int) -> Alarm:
        cause = f"over: {_state(reading)}, healthy for {self.limits.calm} rounds; it began in round {since}"
        return Alarm(rule.kind, "info", round_index, reading.subject, True, reading.value, reading.limit, cause, "")


def _state(reading: Reading) -> str:
    limit = "" if reading.limit is None else f" (limit {reading.limit:.3g})"
    return f"the {reading.what} is {reading.value:.3g}{limit}"
