"""A seed of images described as stages, for kernels that run a whole stage at once.

A stage is a convolution, a group norm and a ReLU, each of which may be missing. A chain of stages ends in a scale per
channel. Numbers of columns say where a stage's parameters lie among those of the seed (`StackedWeights.columns`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from esper.kasmina.blueprints.library import NormResidual, SqueezeExcite
from esper.kasmina.layers import Conv2d, Scale
from esper.kasmina.norms import GroupNorm

MOST_CHANNELS = 128
MOST_VALUES = 16_384  # of a sample at the widest place: 64 KiB in float32


@dataclass(frozen=True)
class Stage:
    """From `inputs` to `outputs` channels."""

    inputs: int
    outputs: int
    side: int = 0  # of the kernel; 0: no convolution
    depthwise: bool = False
    weight: int = 0  # first column of the kernel
    groups: int = 0  # of the norm; 0: none
    gamma: int = 0  # first column of the norm's weight
    beta: int = 0  # and of its bias
    eps: float = 0.0
    relu: bool = False


@dataclass(frozen=True)
class Chain:
    """Stages one after the other, then the scale."""

    stages: tuple[Stage, ...]
    scale: int  # first column
    less_input: bool = False  # the input is subtracted before the scale

    @property
    def channels(self) -> int:
        """At the widest place."""
        return max(max(stage.inputs, stage.outputs) for stage in self.stages)


@dataclass(frozen=True)
class Squeeze:
    """h · tanh(W₂ SiLU(W₁ mean(h))), then the scale."""

    channels: int
    hidden: int
    squeeze: int  # first column of W₁
    excite: int  # and of W₂
    scale: int


def describe(seed: nn.Module, columns: Mapping[str, slice], prefix: str = "seed.") -> Chain | Squeeze | None:
    """The seed in these terms; None if it cannot be said in them, as with most blueprints of a user's own."""

    def first(name: str) -> int:
        return int(columns[prefix + name].start)

    if type(seed) is SqueezeExcite:
        width, hidden = seed.squeeze.inputs, seed.squeeze.outputs
        return Squeeze(width, hidden, first("squeeze.weight"), first("excite.weight"), first("scale.weight"))
    if type(seed) is NormResidual and isinstance(seed.norm, GroupNorm):
        stage = _normed(Stage(seed.norm.width, seed.norm.width), "norm", seed.norm, first)
        return None if stage is None else Chain((stage,), first("scale.weight"), less_input=True)
    if type(seed) is not nn.Sequential or len(list(seed.children())) != len(seed):  # a layer that is used twice
        return None
    stages = list[Stage]()
    for name, layer in seed.named_children():
        if type(layer) is Scale:
            return Chain(tuple(stages), first(f"{name}.weight")) if stages and layer is seed[-1] else None
        added: Stage | None = None
        if type(layer) is Conv2d:
            added = _convolution(layer, first(f"{name}.weight"))
        elif type(layer) is GroupNorm and stages and not stages[-1].groups and not stages[-1].relu:
            added = _normed(stages[-1], name, layer, first)
        elif type(layer) is nn.ReLU and stages:
            added = replace(stages[-1], relu=True)
        if added is None:
            return None
        if type(layer) is Conv2d:
            stages.append(added)
        else:
            stages[-1] = added
    return None


def _convolution(layer: Conv2d, weight: int) -> Stage | None:
    depthwise = layer.groups == layer.inputs == layer.outputs > 1
    if layer.mask is not None or (layer.groups > 1 and not depthwise):
        return None
    return Stage(layer.inputs, layer.outputs, layer.kernel_size, depthwise, weight)


def _normed(stage: Stage, name: str, norm: GroupNorm, first: Callable[[str], int]) -> Stage | None:
    width = norm.width // norm.groups
    if norm.groups > 1 and width & (width - 1):
        return None  # kernels sum over groups of a power of two
    gamma, beta = first(f"{name}.weight"), first(f"{name}.bias")
    return replace(stage, groups=norm.groups, gamma=gamma, beta=beta, eps=norm.eps)


def fits(program: Chain | Squeeze, pixels: int) -> bool:
    """Whether the kernels are meant for samples of this size."""
    return program.channels <= MOST_CHANNELS and program.channels * pixels <= MOST_VALUES
