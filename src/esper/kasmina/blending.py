"""How a seed joins its host: alpha schedules and blending styles."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from esper.kasmina.layers import Linear
from esper.leyline import ALPHA_CURVES, BadValueError, StageError
from esper.leyline.numbers import require_known


def curve_value(curve: str, t: float) -> float:
    """Progress of a ramp at time t, both from 0 to 1; monotone.

    linear t; cosine (1 − cos πt)/2; sigmoid<k> (σ(k(t − ½)) − σ(−k/2)) / (σ(k/2) − σ(−k/2)).
    """
    if curve == "linear":
        return t
    if curve == "cosine":
        return (1 - math.cos(math.pi * t)) / 2
    steepness = float(curve.removeprefix("sigmoid"))
    low, high, here = (1 / (1 + math.exp(-steepness * x)) for x in (-0.5, 0.5, t - 0.5))
    return (here - low) / (high - low)


@dataclass(frozen=True)
class AlphaController:
    """The value of alpha and its ramp. Immutable: `retarget` and `step` return the next one."""

    alpha: float = 0.0
    start: float = 0.0
    target: float = 0.0
    steps: int = 0
    done: int = 0
    curve: str = "linear"

    def __post_init__(self) -> None:
        require_known("alpha curve", self.curve, ALPHA_CURVES)
        for name in ("alpha", "start", "target"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise BadValueError(f"{name} {getattr(self, name)} is not in [0, 1]")
        if self.steps < 0 or not 0 <= self.done <= self.steps:
            raise BadValueError(f"step {self.done} of {self.steps} is not a step of a ramp")

    @property
    def holding(self) -> bool:
        """Whether no ramp is in progress."""
        return self.done == self.steps

    def retarget(self, target: float, steps: int, curve: str = "linear") -> "AlphaController":
        """Start a ramp to `target`. With 0 steps alpha jumps there at once."""
        if not self.holding:
            raise StageError(f"alpha is on its way to {self.target}, step {self.done} of {self.steps}: wait for it")
        begun = AlphaController(self.alpha, self.alpha, target, steps, 0, curve)
        return begun if steps else replace(begun, alpha=target)

    def step(self) -> "AlphaController":
        """One step along the ramp; the last one hits the target exactly. Does nothing while alpha holds."""
        if self.holding:
            return self
        done = self.done + 1
        if done == self.steps:
            return replace(self, alpha=self.target, done=done)
        value = self.start + (self.target - self.start) * curve_value(self.curve, done / self.steps)
        low, high = sorted((self.start, self.target))
        return replace(self, alpha=min(max(value, low), high), done=done)


GATE_BIAS = 2.0  # sigmoid(2) = 0.88: at first a gated seed acts almost like an added one


class BlendGate(nn.Module):
    """One factor in (0, 1) per sample, from the mean of h over pixels or tokens."""

    def __init__(self, width: int, topology: str) -> None:
        super().__init__()
        self.pooled_axes = {"image": 2, "tokens": 1, "vector": 0}[topology]
        self.linear = Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        assert self.linear.bias is not None
        nn.init.constant_(self.linear.bias, GATE_BIAS)

    def forward(self, h: Tensor) -> Tensor:
        """h of any topology → one factor per sample, shaped to multiply h."""
        if self.pooled_axes == 2:
            return torch.sigmoid(self.linear(h.mean((-2, -1))))[..., None, None]
        if self.pooled_axes == 1:
            return torch.sigmoid(self.linear(h.mean(-2)))[..., None]
        return torch.sigmoid(self.linear(h))


def gate_parameters(style: str, width: int) -> int:
    """Parameters that a style adds to the seed."""
    return width + 1 if style == "gate" else 0


def blend(h: Tensor, delta: Tensor, alpha: Tensor | float, style: str, gate: BlendGate | None = None) -> Tensor:
    """The stream with the seed acting at `alpha`, which broadcasts against h. Style `gate` needs the gate."""
    if style == "multiply":
        return h * (1 + alpha * torch.tanh(delta))
    return h + alpha * delta if gate is None else h + alpha * gate(h) * delta


def straight_through(h: Tensor, blended: Tensor) -> Tensor:
    """The value of h with the gradient of the blended stream: h + (y − y.detach())."""
    return h + (blended - blended.detach())
