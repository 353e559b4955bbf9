"""How a seed's Δ joins the stream h. Every style is the identity at alpha 0.

add       h + α·Δ
multiply  h·(1 + α·tanh Δ)
gate      h + α·g(h)·Δ,  g a learned number in (0, 1) per sample
"""

import torch
from torch import Tensor, nn

from esper.kasmina.layers import Linear
from esper.leyline import BLEND_STYLES, SlotSpec, UnknownNameError

GATE_BIAS = 2.0
"""sigmoid(2) = 0.88: a gated seed starts out almost like an added one."""


class BlendGate(nn.Module):
    """One number in (0, 1) per sample, from the mean of h over pixels or tokens."""

    def __init__(self, width: int, topology: str) -> None:
        super().__init__()
        self.pooled = {"image": (-2, -1), "tokens": (-2,), "vector": ()}[topology]
        self.linear = Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        for bias in self.linear.parameters(recurse=False):
            if bias.dim() == 1:
                nn.init.constant_(bias, GATE_BIAS)

    def forward(self, h: Tensor) -> Tensor:
        """h of any topology → one number per sample, with axes to multiply h."""
        gate = torch.sigmoid(self.linear(h.mean(self.pooled) if self.pooled else h))
        return gate.reshape(*gate.shape, *[1] * len(self.pooled))


def gate_parameters(style: str, width: int) -> int:
    """What a style costs beside the seed."""
    return width + 1 if style == "gate" else 0


def make_gate(style: str, spec: SlotSpec) -> BlendGate | None:
    """The gate that a style needs, or None."""
    if style not in BLEND_STYLES:
        raise UnknownNameError("blending style", style, BLEND_STYLES)
    return BlendGate(spec.width, spec.topology) if style == "gate" else None


def blend(h: Tensor, delta: Tensor, alpha: Tensor | float, style: str, gate: BlendGate | None = None) -> Tensor:
    """The stream with the seed acting at `alpha`: a number, or a tensor that broadcasts against h."""
    if style == "add":
        return h + alpha * delta
    if style == "multiply":
        return h * (1 + alpha * torch.tanh(delta))
    if gate is None:
        raise UnknownNameError("blending style without a gate", style, BLEND_STYLES[:-1])
    opened: Tensor = gate(h)
    return h + alpha * opened * delta


def straight_through(h: Tensor, blended: Tensor) -> Tensor:
    """The value of h with the gradient of the blended stream: h + (y − y.detach())."""
    return h + (blended - blended.detach())
