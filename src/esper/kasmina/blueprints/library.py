"""The built-in blueprints for images, tokens and vectors."""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import Conv2d, Linear, Scale, SelfAttention
from esper.kasmina.norms import GroupNorm, LayerNorm
from esper.leyline import TOPOLOGIES

CHANNELS_PER_GROUP = 16  # at least, so that a norm works even on a one-pixel image
ATTENTION_HEADS = 4

image, tokens, vector = (partial(BlueprintRegistry.register, topology) for topology in TOPOLOGIES)
image_with_norm = partial(image, min_values=4)  # a norm of fewer values returns almost constants


def _norm(width: int) -> GroupNorm:
    """As many equal groups as have `CHANNELS_PER_GROUP` channels each."""
    most = max(1, width // CHANNELS_PER_GROUP)
    return GroupNorm(max(groups for groups in range(1, most + 1) if width % groups == 0), width)


def _chain(width: int, **layers: nn.Module) -> nn.Module:
    """The layers one after the other, then the scale."""
    return nn.Sequential(OrderedDict(layers, scale=Scale(width)))


class NormResidual(nn.Module):
    """norm(h) − h."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = norm
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(self.norm(h) - h)


@image_with_norm("norm", lambda c: 3 * c)
def image_norm(width: int) -> nn.Module:
    """GN(h) − h."""
    return NormResidual(_norm(width), width)


def squeezed_width(width: int) -> int:
    """Hidden width of squeeze-excite."""
    return max(1, width // 4)


# With a single channel the gradient almost vanishes on signed activations.
@image("attention", lambda c: 2 * c * squeezed_width(c) + c, min_width=2)
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
@image_with_norm("depthwise", lambda c: c * c + 12 * c, min_width=2)
def depthwise(width: int) -> nn.Module:
    """depthwise 3×3 → 1×1 → GN → ReLU."""
    depthwise, pointwise = Conv2d(width, width, 3, groups=width), Conv2d(width, width, 1)
    return _chain(width, depthwise=depthwise, pointwise=pointwise, norm=_norm(width), relu=nn.ReLU())


def narrow_width(width: int) -> int:
    """Inner width of the bottleneck."""
    return max(8, width // 4)


@image_with_norm("bottleneck", lambda c: 2 * c * narrow_width(c) + 9 * narrow_width(c) ** 2 + 3 * c)
def bottleneck(width: int) -> nn.Module:
    """1×1 to max(8, C/4) → ReLU → 3×3 → ReLU → 1×1 → GN."""
    inner = narrow_width(width)
    down, conv, up = Conv2d(width, inner, 1), Conv2d(inner, inner, 3), Conv2d(inner, width, 1)
    return _chain(width, down=down, relu=nn.ReLU(), conv=conv, conv_relu=nn.ReLU(), up=up, norm=_norm(width))


def _convolution(width: int, kernel_size: int) -> nn.Module:
    """k×k → GN → ReLU."""
    return _chain(width, conv=Conv2d(width, width, kernel_size), norm=_norm(width), relu=nn.ReLU())


image_with_norm("conv_small", lambda c: c * c + 3 * c, min_width=2)(partial(_convolution, kernel_size=1))
image_with_norm("conv_light", lambda c: 9 * c * c + 3 * c)(partial(_convolution, kernel_size=3))


# With one channel the second norm cancels the factor of the first.
@image_with_norm("conv_heavy", lambda c: 18 * c * c + 5 * c, min_width=2)
def conv_heavy(width: int) -> nn.Module:
    """3×3 → GN → ReLU, twice."""
    return _chain(
        width,
        first=Conv2d(width, width, 3),
        first_norm=_norm(width),
        first_relu=nn.ReLU(),
        second=Conv2d(width, width, 3),
        second_norm=_norm(width),
        second_relu=nn.ReLU(),
    )


def feature_norm(width: int) -> nn.Module:
    """LN(h) − h."""
    return NormResidual(LayerNorm(width), width)


def low_rank(width: int, rank: int) -> nn.Module:
    """U D h: a linear map of low rank."""
    return _chain(width, down=Linear(width, rank, bias=False), up=Linear(rank, width, bias=False))


def perceptron(width: int, factor: int) -> nn.Module:
    """W₂ GELU(W₁ h)."""
    return _chain(width, up=Linear(width, factor * width), gelu=nn.GELU(), down=Linear(factor * width, width))


def token_attention(width: int) -> nn.Module:
    """Causal attention with four heads."""
    return _chain(width, attention=SelfAttention(width, ATTENTION_HEADS))


for register in (tokens, vector):
    register("norm", lambda c: 3 * c, min_width=3)(feature_norm)  # a norm of two values only tells which is larger
    register("lora", lambda c: 17 * c)(partial(low_rank, rank=8))
    register("lora_large", lambda c: 65 * c)(partial(low_rank, rank=32))
    if register is tokens:
        register("attention", lambda c: 4 * c * c + 4 * c, min_resolution=2, multiple_of=ATTENTION_HEADS)(
            token_attention
        )
    register("mlp_small", lambda c: 4 * c * c + 4 * c)(partial(perceptron, factor=2))
    register("mlp", lambda c: 8 * c * c + 6 * c)(partial(perceptron, factor=4))
