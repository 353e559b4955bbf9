"""How far a gradient norm has drifted from what it used to be."""

import math
from dataclasses import dataclass

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive, require_whole


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
