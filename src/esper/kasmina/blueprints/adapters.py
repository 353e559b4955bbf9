"""Adapters: blueprints for pretrained models, which fold into the weights of the submodule in front of them.

    affine         behind a norm: a factor and an offset per channel
    scale          behind a norm without a bias, such as RMSNorm: a factor per channel
    lora_linear_r  at a linear layer: a map of rank r of its input
    lora_conv_r    at a convolution: the same kernel with r outputs, then 1×1
    linear1x1      behind images: a 1×1 convolution without norm; folds where the submodule is a convolution

They stand apart from the other blueprints, so that tasks and trained policies keep their lists.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BlueprintRegistry, Folding
from esper.kasmina.layers import Scale, per_channel
from esper.leyline import TOPOLOGIES, Topology

RANKS = (1, 2, 4, 8, 16, 32)

Values = dict[str, Tensor]
"""New values of a submodule's parameters, by name"""


# -- norms ------------------------------------------------------------------------------------------------------------


class Affine(nn.Module):
    """scale · h + offset per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = Scale(width)
        self.offset = nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(h) + per_channel(self.offset, h)


def _is_norm(module: nn.Module) -> bool:
    """Whether it has one weight per channel and is called a norm. Libraries have norms of their own."""
    weight = getattr(module, "weight", None)
    named = any("norm" in kind.__name__.lower() for kind in type(module).__mro__)
    leaf = next(module.children(), None) is None
    return leaf and named and isinstance(weight, nn.Parameter) and weight.dim() == 1


def _norm_with_bias(module: nn.Module) -> bool:
    return _is_norm(module) and isinstance(getattr(module, "bias", None), nn.Parameter)


def _norm_without_bias(module: nn.Module) -> bool:
    return _is_norm(module) and getattr(module, "bias", None) is None


def _fold_affine(base: nn.Module, seed: nn.Module, alpha: float) -> Values | None:
    """(1 + αs)(wx + b) + αt = (1 + αs)w · x + (1 + αs)b + αt."""
    if not _norm_with_bias(base) or not isinstance(seed, Affine):
        return None
    factor = 1 + alpha * seed.scale.weight
    weight, bias = base.get_parameter("weight"), base.get_parameter("bias")
    return {"weight": weight * factor, "bias": bias * factor + alpha * seed.offset}


def _fold_scale(base: nn.Module, seed: nn.Module, alpha: float) -> Values | None:
    if not _norm_without_bias(base) or not isinstance(seed, Scale):
        return None
    return {"weight": base.get_parameter("weight") * (1 + alpha * seed.weight)}


# -- low rank ---------------------------------------------------------------------------------------------------------


class LowRankUpdate(nn.Module):
    """up(down(x)) of the input x of the submodule in front. `up` is zero at birth."""

    reads_input = True
    down: nn.Linear | nn.Conv2d
    up: nn.Linear | nn.Conv2d

    def __init__(self, down: nn.Linear | nn.Conv2d, up: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.down, self.up = down, up
        nn.init.zeros_(up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.down(x))
        return y


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer that computes as torch's own. Quantised ones have other weights."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and bool(module.weight.is_floating_point())
    )


def _is_convolution(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether it is a convolution of all channels that computes as torch's own."""
    return isinstance(module, nn.Conv2d) and type(module).forward is nn.Conv2d.forward and module.groups == 1


def _linear_count(base: nn.Module, rank: int) -> int:
    assert isinstance(base, nn.Linear)
    return rank * (base.in_features + base.out_features)


def _convolution_count(base: nn.Module, rank: int) -> int:
    assert isinstance(base, nn.Conv2d)
    return rank * (base.weight[0].numel() + base.out_channels)


def _low_rank_linear(base: nn.Module, rank: int) -> nn.Module:
    assert isinstance(base, nn.Linear)
    down = nn.Linear(base.in_features, rank, bias=False)
    return LowRankUpdate(down, nn.Linear(rank, base.out_features, bias=False))


def _low_rank_convolution(base: nn.Module, rank: int) -> nn.Module:
    assert isinstance(base, nn.Conv2d)
    geometry = base.kernel_size, base.stride, base.padding, base.dilation
    down = nn.Conv2d(base.in_channels, rank, *geometry, bias=False, padding_mode=base.padding_mode)  # type: ignore[arg-type]  # sizes are pairs
    return LowRankUpdate(down, nn.Conv2d(rank, base.out_channels, 1, bias=False))


def _fold_low_rank(base: nn.Module, seed: nn.Module, alpha: float) -> Values | None:
    """W + α · up · down, with the kernel of a convolution as part of the input axis."""
    if not isinstance(seed, LowRankUpdate) or not (_is_linear(base) or _is_convolution(base)):
        return None
    weight = base.get_parameter("weight")
    up, down = (part.get_parameter("weight").flatten(1) for part in (seed.up, seed.down))
    wide = torch.promote_types(weight.dtype, torch.float32)
    return {"weight": (weight.to(wide) + alpha * (up.to(wide) @ down.to(wide)).view_as(weight)).to(weight.dtype)}


def _offered(count: Callable[[nn.Module], int], kind: Callable[[nn.Module], bool]) -> Callable[[nn.Module], bool]:
    """Whether a layer is of that kind, and larger than its update."""
    return lambda base: kind(base) and count(base) < sum(p.numel() for p in base.parameters())


def _square_linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


def _square_convolution(width: int) -> nn.Module:
    return nn.Conv2d(width, width, 3, padding=1)


def _build_example(
    build: Callable[[nn.Module], nn.Module], example: Callable[[int], nn.Module], width: int
) -> nn.Module:
    """A seed behind an example of its submodule."""
    return build(example(width))


def _register_low_rank(rank: int) -> None:
    linear, convolution = partial(_linear_count, rank=rank), partial(_convolution_count, rank=rank)
    at_linear = Folding(
        _offered(linear, _is_linear), _fold_low_rank, partial(_low_rank_linear, rank=rank), linear, _square_linear
    )
    at_convolution = Folding(
        _offered(convolution, _is_convolution),
        _fold_low_rank,
        partial(_low_rank_convolution, rank=rank),
        convolution,
        _square_convolution,
    )
    places: tuple[tuple[Topology, str, Folding, Callable[[int], int]], ...] = (
        ("tokens", f"lora_linear_{rank}", at_linear, lambda c: 2 * rank * c),
        ("vector", f"lora_linear_{rank}", at_linear, lambda c: 2 * rank * c),
        ("image", f"lora_conv_{rank}", at_convolution, lambda c: 10 * rank * c),
    )
    for topology, name, folding, count in places:
        assert folding.build is not None and folding.example is not None
        build = partial(_build_example, folding.build, folding.example)
        BlueprintRegistry.register(topology, name, count, folding=folding)(build)


# -- 1×1 --------------------------------------------------------------------------------------------------------------


def _mixing(width: int) -> nn.Module:
    """W h, with W zero at birth."""
    mix = nn.Conv2d(width, width, 1, bias=False)
    nn.init.zeros_(mix.weight)
    return mix


def _fold_mixing(base: nn.Module, seed: nn.Module, alpha: float) -> Values | None:
    """(1 + αM)(W x + b)."""
    if not _is_convolution(base) or not isinstance(seed, nn.Conv2d):
        return None
    mix = alpha * seed.weight.flatten(1).to(base.weight.dtype)
    values = {"weight": base.weight + (mix @ base.weight.flatten(1)).view_as(base.weight)}
    return values if base.bias is None else values | {"bias": base.bias + mix @ base.bias}


# -- registration -----------------------------------------------------------------------------------------------------

for topology in TOPOLOGIES:
    BlueprintRegistry.register(topology, "affine", lambda c: 2 * c, folding=Folding(_norm_with_bias, _fold_affine))(
        Affine
    )
    BlueprintRegistry.register(topology, "scale", lambda c: c, folding=Folding(_norm_without_bias, _fold_scale))(Scale)
for rank in RANKS:
    _register_low_rank(rank)
BlueprintRegistry.register("image", "linear1x1", lambda c: c * c, folding=Folding(lambda base: True, _fold_mixing))(
    _mixing
)
