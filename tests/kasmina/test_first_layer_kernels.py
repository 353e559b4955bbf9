"""The CUDA kernels of a first convolution against torch in float64, where some rows see the same images."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina.norms import BatchNorm2d
from esper.kasmina.row_hints import shared_inputs, tiles_of
from esper.tolaria.rows import input_tiles

CUDA = torch.device("cuda")

SHAPES = [  # groups of rows, inputs, outputs, side of the kernel, height, width
    ([0, 0, 1, 0, 1], 3, 8, 3, 6, 5),
    ([0] * 9, 1, 4, 1, 4, 4),
    ([0, 1, 2, 3], 3, 6, 3, 7, 7),
    ([0] * 10 + [1] * 3, 2, 20, 5, 5, 5),
    ([0, 0], 3, 1, 3, 1, 1),
    ([0, 0, 1, 1], 4, 64, 3, 32, 32),
]


def images_of(groups: list[int], inputs: int, height: int, width: int) -> Tensor:
    """(R, 3, C, H, W): the rows of a group have the same."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(max(groups) + 1, 3, inputs, height, width, generator=generator)[torch.tensor(groups)].to(CUDA)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """What torch makes of every row."""
    return torch.stack([F.conv2d(h, w, padding=w.shape[-1] // 2) for h, w in zip(x, weight, strict=True)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "inputs", "outputs", "side", "height", "width"), SHAPES)
def test_a_first_convolution_equals_torch(
    groups: list[int], inputs: int, outputs: int, side: int, height: int, width: int, dtype: torch.dtype
) -> None:
    """Outputs and gradients of weights; also where all rows have one image in memory."""
    from esper.kasmina.kernels.first_layer import input_conv  # only CUDA builds include triton

    x, tiles = images_of(groups, inputs, height, width).to(dtype), input_tiles(groups, CUDA)
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(len(groups), outputs, inputs, side, side, generator=generator).to(CUDA, dtype)
    weight64 = weight.double().requires_grad_()
    wanted = convolved(x.double(), weight64)
    gradient = torch.randn(wanted.shape, generator=generator).to(CUDA, dtype)
    wanted.backward(gradient.double())
    for given in [x] if max(groups) else [x, x[0].expand_as(x)]:
        own = weight.clone().requires_grad_()
        found = input_conv(given, own, tiles).permute(3, 0, 4, 1, 2)
        found.backward(gradient)
        assert own.grad is not None
        assert weight64.grad is not None
        for mine, reference in ((found, wanted), (own.grad, weight64.grad)):
            gap = (mine.detach().double() - reference.detach()).abs().max() / reference.detach().abs().max()
            assert float(gap) <= (1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.gpu
def test_a_row_that_is_not_finite_breaks_alone() -> None:
    """Rows of one tile share a product; a NaN in one row's weights or gradient stays in that row."""
    from esper.kasmina.kernels.first_layer import input_conv  # only CUDA builds include triton

    groups = [0, 0, 0, 1, 1]
    x, tiles = images_of(groups, 3, 8, 8), input_tiles(groups, CUDA)
    others = [0, 2, 3, 4]

    def run(where: str) -> tuple[Tensor, Tensor]:
        weight = torch.linspace(-1, 1, 5 * 8 * 27, device=CUDA).view(5, 8, 3, 3, 3)
        if where == "weights":
            weight[1, 0, 0, 0, 0] = torch.nan
        y = input_conv(x, weight.requires_grad_(), tiles)
        gradient = torch.ones_like(y)
        if where == "gradient":
            gradient[0, 0, 0, 1, 0] = torch.nan
        y.backward(gradient)
        assert weight.grad is not None
        return y.detach(), weight.grad

    whole, to_whole = run("nowhere")
    for where in ("weights", "gradient"):
        found, to_weight = run(where)
        assert torch.equal(found[:, :, :, others], whole[:, :, :, others])
        assert torch.equal(to_weight[others], to_whole[others])
        assert not torch.cat([found[:, :, :, 1].flatten(), to_weight[1].flatten()]).isfinite().all()


@pytest.mark.gpu
def test_the_norm_of_an_evaluation_equals_its_parts() -> None:
    """With running statistics, norm, ReLU and pool are one kernel if no gradient is wanted."""
    norm = BatchNorm2d(6).to(CUDA)
    shape = (5, 6)
    generator = torch.Generator(device=CUDA).manual_seed(5)
    draws = torch.rand(4, *shape, device=CUDA, generator=generator)
    names = ("weight", "bias", "running_mean", "running_var")
    state = dict(zip(names, draws - torch.tensor([0.5, 0.5, 0.5, 0], device=CUDA)[:, None, None], strict=True))
    x = torch.randn(5, 7, 6, 8, 10, device=CUDA, generator=generator)
    with torch.no_grad():
        for name, value in state.items():
            getattr(norm, name).data = value
        found, _ = norm.relu_pool(x, train=False)
        plain, _ = norm(x, train=False)
    wanted = F.max_pool2d(F.relu(plain).flatten(0, 1), 2).view_as(found)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_tiles_hold_the_rows_of_one_group() -> None:
    """At most eight each; where a tile has fewer, −1."""
    groups = [0] * 10 + [1] * 3
    tiles = input_tiles(groups, torch.device("cpu")).tolist()
    assert tiles == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9] + [-1] * 6, [10, 11, 12] + [-1] * 5]


def test_only_the_inputs_of_a_pass_have_tiles() -> None:
    """A layer that reads something else does not share it."""
    inputs, tiles = torch.zeros(2, 1, 3, 4, 4), input_tiles([0, 0], torch.device("cpu"))
    with shared_inputs(inputs, tiles):
        assert tiles_of(inputs) is tiles
        assert tiles_of(inputs.clone()) is None
    assert tiles_of(inputs) is None
