"""Seeds described as stages, for the kernels that run whole stages."""

import pytest
import torch
from torch import nn

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import Conv2d, Scale
from esper.kasmina.norms import GroupNorm
from esper.kasmina.stages import Chain, Squeeze, Stage, describe, fits
from esper.tolaria.banks import StackedWeights

CPU = torch.device("cpu")


def described(seed: nn.Module) -> Chain | Squeeze | None:
    """As a bank describes it."""
    shapes = {f"seed.{name}": parameter.shape for name, parameter in seed.named_parameters()}
    return describe(seed, StackedWeights(1, shapes, CPU, torch.float32).columns)


def built(name: str, width: int = 8) -> nn.Module:
    """A blueprint of images."""
    return BlueprintRegistry.build("image", name, width, resolution=8, rng_seed=0)


@pytest.mark.parametrize("width", [8, 12, 48])
@pytest.mark.parametrize("offer", BlueprintRegistry.names("image"))
def test_every_blueprint_of_images_is_described(offer: str, width: int) -> None:
    """The scale is last, so that a seed's parameters end there."""
    seed = built(offer, width)
    program = described(seed)
    assert program is not None
    assert program.scale + width == sum(parameter.numel() for parameter in seed.parameters())
    assert program.channels == width


def test_where_the_parameters_lie() -> None:
    """Two convolutions with a norm each; and one that narrows."""
    heavy = described(built("conv_heavy"))
    assert isinstance(heavy, Chain)
    first = Stage(8, 8, side=3, weight=0, groups=1, gamma=576, beta=584, eps=1e-5, relu=True)
    second = Stage(8, 8, side=3, weight=592, groups=1, gamma=1168, beta=1176, eps=1e-5, relu=True)
    assert heavy == Chain((first, second), scale=1184)
    narrow = described(built("bottleneck", 64))
    assert isinstance(narrow, Chain)
    assert [(stage.inputs, stage.outputs, stage.side, stage.relu) for stage in narrow.stages] == [
        (64, 16, 1, True),
        (16, 16, 3, True),
        (16, 64, 1, False),
    ]
    depthwise = described(built("depthwise"))
    assert isinstance(depthwise, Chain)
    assert [stage.depthwise for stage in depthwise.stages] == [True, False]
    assert described(built("attention")) == Squeeze(8, 2, squeeze=0, excite=16, scale=32)
    norm = described(built("norm"))
    assert isinstance(norm, Chain)
    assert norm.less_input


@pytest.mark.parametrize(
    "layers",
    [
        [Conv2d(4, 4, 3)],
        [Scale(4)],
        [Scale(4), Conv2d(4, 4, 3)],
        [nn.GELU(), Conv2d(4, 4, 3), Scale(4)],
        [Conv2d(4, 4, 3), nn.GELU(), Scale(4)],
        [Conv2d(4, 4, 3, groups=2), Scale(4)],
        [Conv2d(4, 4, 3, masked=True), Scale(4)],
        [Conv2d(4, 4, 3), nn.ReLU(), GroupNorm(1, 4), Scale(4)],
        [Conv2d(6, 6, 3), GroupNorm(2, 6), Scale(6)],
    ],
    ids=lambda layers: "-".join(type(layer).__name__ for layer in layers),
)
def test_others_take_the_plain_path(layers: list[nn.Module]) -> None:
    """No scale, something unknown, a norm behind the ReLU, or groups of three channels."""
    assert described(nn.Sequential(*layers)) is None
    assert described(nn.Identity()) is None


def test_a_layer_that_is_used_twice_takes_the_plain_path() -> None:
    """Its second use has no name of its own."""
    relu = nn.ReLU()
    assert described(nn.Sequential(Conv2d(4, 4, 3), relu, Conv2d(4, 4, 3), relu, Scale(4))) is None
    assert described(nn.Sequential(Conv2d(4, 4, 3), nn.ReLU(), Conv2d(4, 4, 3), nn.ReLU(), Scale(4))) is not None


def test_large_samples_take_the_plain_path() -> None:
    """A sample of more than 64 KiB in float32, or of too many channels."""
    program = described(built("conv_light"))
    assert program is not None
    assert fits(program, 32 * 32)
    assert fits(program, 16_384 // 8)
    assert not fits(program, 16_384 // 8 + 1)
    wide = described(built("conv_small", 256))
    assert wide is not None
    assert not fits(wide, 4)
