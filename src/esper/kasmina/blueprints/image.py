"""Seeds for image slots, h (B, C, H, W). Each returns Δ(h) = scale · f(h); the class says what f is."""

from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import Conv2d, GroupNorm, Linear, Scale

CHANNELS_PER_GROUP = 16
"""At least so many channels share a norm, so that it says something even where the image is one pixel."""
MIN_NORM_VALUES = 4


def norm_groups(width: int) -> int:
    """The most groups that divide the width into groups of at least `CHANNELS_PER_GROUP`."""
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


# On a single channel, mean, SiLU and tanh leave one number whose gradient all but vanishes on signed activations.
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


# Under a norm a single 1×1 weight could only change the sign: hence two channels.
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


@BlueprintRegistry.register("image", "conv_small", lambda c: c * c + 3 * c, min_width=2, min_values=MIN_NORM_VALUES)
class ConvSmall(nn.Module):
    """1×1 → GN → ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = Conv2d(width, width, 1)
        self.norm = _norm(width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(F.relu(self.norm(self.conv(h))))


@BlueprintRegistry.register("image", "conv_light", lambda c: 9 * c * c + 3 * c, min_values=MIN_NORM_VALUES)
class ConvLight(nn.Module):
    """3×3 → GN → ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = Conv2d(width, width, 3)
        self.norm = _norm(width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(F.relu(self.norm(self.conv(h))))


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
