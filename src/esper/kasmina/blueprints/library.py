"""The built-in blueprints for images, tokens and vectors."""

from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import Conv2d, GroupNorm, LayerNorm, Linear, Scale, SelfAttention

CHANNELS_PER_GROUP = 16
"""Minimum number of channels per norm group, so that a norm works even on a one-pixel image."""
MIN_NORM_VALUES = 4


def norm_groups(width: int) -> int:
    """The largest number of equal groups with at least `CHANNELS_PER_GROUP` channels each."""
    return max(g for g in range(1, max(1, width // CHANNELS_PER_GROUP) + 1) if width % g == 0)


def _norm(width: int) -> GroupNorm:
    return GroupNorm(norm_groups(width), width)


@BlueprintRegistry.register("image", "norm", lambda c: 3 * c, min_values=MIN_NORM_VALUES)
class ImageNorm(nn.Module):
    """GN(h) − h."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(self.norm(h) - h)


def squeezed_width(width: int) -> int:
    """Hidden width of squeeze-excite."""
    return max(1, width // 4)


# With a single channel the gradient almost vanishes on signed activations.
@BlueprintRegistry.register("image", "attention", lambda c: 2 * c * squeezed_width(c) + c, min_width=2)
class SqueezeExcite(nn.Module):
    """h · tanh(W₂ SiLU(W₁ mean(h)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze = Linear(width, squeezed_width(width), bias=False)
        self.excite = Linear(squeezed_width(width), width, bias=False)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        factor = F.tanh(self.excite(F.silu(self.squeeze(h.mean((-2, -1))))))
        return self.scale(h * factor[..., None, None])


# Before a norm, a single 1×1 weight could only change the sign.
@BlueprintRegistry.register("image", "depthwise", lambda c: c * c + 12 * c, min_width=2, min_values=MIN_NORM_VALUES)
class Depthwise(nn.Module):
    """depthwise 3×3 → 1×1 → GN → ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = Conv2d(width, width, 3, groups=width)
        self.pointwise = Conv2d(width, width, 1)
        self.norm = _norm(width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(F.relu(self.norm(self.pointwise(self.depthwise(h)))))


def narrow_width(width: int) -> int:
    """Inner width of the bottleneck."""
    return max(8, width // 4)


@BlueprintRegistry.register(
    "image",
    "bottleneck",
    lambda c: 2 * c * narrow_width(c) + 9 * narrow_width(c) ** 2 + 3 * c,
    min_values=MIN_NORM_VALUES,
)
class Bottleneck(nn.Module):
    """1×1 to max(8, C/4) → ReLU → 3×3 → ReLU → 1×1 → GN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = narrow_width(width)
        self.down = Conv2d(width, inner, 1)
        self.conv = Conv2d(inner, inner, 3)
        self.up = Conv2d(inner, width, 1)
        self.norm = _norm(width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(self.norm(self.up(F.relu(self.conv(F.relu(self.down(h)))))))


class Convolution(nn.Module):
    """k×k → GN → ReLU."""

    def __init__(self, width: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = Conv2d(width, width, kernel_size)
        self.norm = _norm(width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(F.relu(self.norm(self.conv(h))))


@BlueprintRegistry.register("image", "conv_small", lambda c: c * c + 3 * c, min_width=2, min_values=MIN_NORM_VALUES)
def conv_small(width: int) -> Convolution:
    """1×1."""
    return Convolution(width, 1)


@BlueprintRegistry.register("image", "conv_light", lambda c: 9 * c * c + 3 * c, min_values=MIN_NORM_VALUES)
def conv_light(width: int) -> Convolution:
    """3×3."""
    return Convolution(width, 3)


# With one channel the second norm cancels the factor of the first.
@BlueprintRegistry.register(
    "image", "conv_heavy", lambda c: 18 * c * c + 5 * c, min_width=2, min_values=MIN_NORM_VALUES
)
class ConvHeavy(nn.Module):
    """3×3 → GN → ReLU, twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Conv2d(width, width, 3)
        self.first_norm = _norm(width)
        self.second = Conv2d(width, width, 3)
        self.second_norm = _norm(width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        h = F.relu(self.first_norm(self.first(h)))
        return self.scale(F.relu(self.second_norm(self.second(h))))


MIN_NORM_WIDTH = 3
"""A norm of two values only tells which is larger."""
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
    """Hidden width twice the width."""
    return Perceptron(width, 2)


@BlueprintRegistry.register("tokens", "mlp", lambda c: 8 * c * c + 6 * c)
@BlueprintRegistry.register("vector", "mlp", lambda c: 8 * c * c + 6 * c)
def mlp(width: int) -> Perceptron:
    """Hidden width four times the width."""
    return Perceptron(width, 4)
