"""Seeds for token slots, h (B, T, C), and vector slots, h (B, C): what works on the last axis serves both.

Each returns Δ(h) = scale · f(h); the class says what f is.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import LayerNorm, Linear, Scale, SelfAttention

MIN_NORM_WIDTH = 3
"""Of two values a norm keeps nothing but which is larger."""
ATTENTION_HEADS = 4


@BlueprintRegistry.register("tokens", "norm", lambda c: 3 * c, min_width=MIN_NORM_WIDTH)
@BlueprintRegistry.register("vector", "norm", lambda c: 3 * c, min_width=MIN_NORM_WIDTH)
class FeatureNorm(nn.Module):
    """LN(h) − h."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(self.norm(h) - h)


class LowRank(nn.Module):
    """U D h: a linear map of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = Linear(width, rank, bias=False)
        self.up = Linear(rank, width, bias=False)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(self.up(self.down(h)))


@BlueprintRegistry.register("tokens", "lora", lambda c: 17 * c)
@BlueprintRegistry.register("vector", "lora", lambda c: 17 * c)
def lora(width: int) -> LowRank:
    """Rank 8."""
    return LowRank(width, 8)


@BlueprintRegistry.register("tokens", "lora_large", lambda c: 65 * c)
@BlueprintRegistry.register("vector", "lora_large", lambda c: 65 * c)
def lora_large(width: int) -> LowRank:
    """Rank 32."""
    return LowRank(width, 32)


@BlueprintRegistry.register(
    "tokens", "attention", lambda c: 4 * c * c + 4 * c, min_resolution=2, multiple_of=ATTENTION_HEADS
)
class TokenAttention(nn.Module):
    """Causal attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, ATTENTION_HEADS)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(self.attention(h))


class Perceptron(nn.Module):
    """W₂ GELU(W₁ h)."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.up = Linear(width, factor * width)
        self.down = Linear(factor * width, width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(self.down(F.gelu(self.up(h))))


@BlueprintRegistry.register("tokens", "mlp_small", lambda c: 4 * c * c + 4 * c)
@BlueprintRegistry.register("vector", "mlp_small", lambda c: 4 * c * c + 4 * c)
def mlp_small(width: int) -> Perceptron:
    """Twice as wide inside."""
    return Perceptron(width, 2)


@BlueprintRegistry.register("tokens", "mlp", lambda c: 8 * c * c + 6 * c)
@BlueprintRegistry.register("vector", "mlp", lambda c: 8 * c * c + 6 * c)
def mlp(width: int) -> Perceptron:
    """Four times as wide inside."""
    return Perceptron(width, 4)
