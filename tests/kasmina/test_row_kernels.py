"""The CUDA kernels of rows against the same layers in float64 on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.layers import Conv2d, Scale
from esper.kasmina.norms import GroupNorm
from esper.kasmina.row_hints import living_rows
from esper.kasmina.row_layout import BACK, STORED, take_rows

pytestmark = pytest.mark.gpu

BATCH, SIDE = 6, 13
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "convolution": lambda width: Conv2d(width, width, 3),
    "wide convolution": lambda width: Conv2d(width, width, 5),
    "convolution of many channels": lambda width: Conv2d(width, width + 32, 3),
    "convolution of RGB": lambda width: Conv2d(3, width, 3),
    "narrowing convolution": lambda width: Conv2d(width, width // 2, 3),
    "mixing convolution": lambda width: Conv2d(width, width + 3, 1),
    "wide mixing convolution": lambda width: Conv2d(8 * width, 5 * width, 1),
    "norm of one group": lambda width: GroupNorm(1, width),
    "norm of pairs": lambda width: GroupNorm(width // 2, width),
    "scale": Scale,
}


def rows_of(rows: int, width: int) -> Tensor:
    """Images (R, B, C, H, W), not centred."""
    return torch.randn(rows, BATCH, width, SIDE, SIDE, generator=torch.Generator().manual_seed(rows)).double() + 0.5


def outcome(layer: nn.Module, weights: dict[str, Tensor], x: Tensor, like: Tensor) -> list[Tensor]:
    """Output, and gradients of input and weights for a loss that weighs all outputs differently; as float64."""
    weights = {name: value.to(like, copy=True).requires_grad_() for name, value in weights.items()}
    x = x.to(like, copy=True).requires_grad_()
    y = functional_call(layer, weights, (x,))
    factors = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(like)
    (y * factors).sum().backward()
    tensors = [y, x.grad, *(weight.grad for weight in weights.values())]
    return [tensor.detach().cpu().double() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("rows", [2, 12, 70])
@pytest.mark.parametrize("width", [4, 6, 32])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_float64(name: str, width: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, to what float32 can hold; several blocks of rows and of pixels."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = LAYERS[name](width)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(rows, *value.shape, generator=generator).double() for name, value in layer.named_parameters()
    }
    x = rows_of(rows, layer.inputs if isinstance(layer, Conv2d) else width)
    expected = outcome(layer, weights, x, torch.zeros((), dtype=torch.float64))
    mine = outcome(layer, weights, x, torch.zeros((), device="cuda"))
    assert len(mine) == len(expected) == 2 + len(weights)
    for result, wanted in zip(mine, expected, strict=True):
        assert float((result - wanted).abs().max()) < 3e-5 * float(wanted.abs().max()), name


@pytest.mark.parametrize("name", ["norm of pairs", "scale"])
def test_rows_need_not_lie_side_by_side(name: str) -> None:
    """A part of the rows of a larger tensor, and one channel spread over all rows, are read as what they are."""
    part, spread = rows_of(9, 4).float().cuda()[2:7], rows_of(1, 2).float().cuda().expand(5, -1, -1, -1, -1)
    for x in (part, spread):
        layer = LAYERS[name](x.shape[2])
        weights = {name: torch.rand(5, *value.shape, device="cuda") for name, value in layer.named_parameters()}
        result, wanted = (functional_call(layer, weights, (given,)) for given in (x, stored(x)))
        assert torch.equal(result, wanted)


def stored(x: Tensor) -> Tensor:
    """The same rows as a pass has them."""
    return x.permute(STORED["cuda"]).contiguous().permute(BACK["cuda"])


def test_rows_are_taken() -> None:
    """Bit for bit, numbers that occur twice included, over several blocks of columns."""
    x = rows_of(70, 3).float().cuda()
    numbers = torch.tensor([6, 0, 0, 3, *range(69, 5, -1)], device="cuda")
    assert torch.equal(take_rows(stored(x), numbers), x[numbers])


BROKEN = 1
"""The row that is not finite."""
WITH_NEIGHBOURS: dict[str, Callable[[int], nn.Module]] = LAYERS | {
    "widening convolution": lambda width: Conv2d(width, 2 * width, 3),
    "narrowing convolution": lambda width: Conv2d(2 * width, width, 3),
    "depthwise convolution": lambda width: Conv2d(width, width, 3, groups=width),
}


def spoiled(
    layer: nn.Module, weights: dict[str, Tensor], x: Tensor, where: str | None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Output and gradient of the input, and gradients of weights, with a NaN in one row of x, weights or gradient."""
    x = stored(x.clone())
    weights = {name: value.clone() for name, value in weights.items()}
    if where == "input":
        x[BROKEN, 2, 0, 3, 3] = torch.inf
    if where == "weights":
        for value in weights.values():
            value[BROKEN].flatten()[0] = torch.nan
    for tensor in (x, *weights.values()):
        tensor.requires_grad_()
    y = functional_call(layer, weights, (x,))
    gradient = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape).to(y.dtype)
    if where == "gradient":
        gradient[BROKEN, 2, 0, 3, 3] = torch.nan
    y.backward(gradient)
    assert x.grad is not None
    found = {name: weight.grad.detach() for name, weight in weights.items() if weight.grad is not None}
    return [y.detach(), x.grad], found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["input", "weights", "gradient"])
@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("width", [4, 6, 32])
@pytest.mark.parametrize("name", WITH_NEIGHBOURS)
def test_a_row_that_is_not_finite_breaks_alone(
    name: str, width: int, rows: int, where: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are as without it, and the gradient of its own weights or input shows it."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = WITH_NEIGHBOURS[name](width)
    inputs = layer.inputs if isinstance(layer, Conv2d) else width
    x, generator = rows_of(rows, inputs).to("cuda", dtype), torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(rows, *value.shape, generator=generator).to("cuda", dtype)
        for name, value in layer.named_parameters()
    }
    wanted, of_weights = spoiled(layer, weights, x, None)
    found, mine = spoiled(layer, weights, x, where)
    others = torch.tensor([row for row in range(rows) if row != BROKEN], device="cuda")
    tolerance = 3e-5 if dtype is torch.float32 else 2e-2
    for result, reference in zip([*found, *mine.values()], [*wanted, *of_weights.values()], strict=True):
        gap = (result.float() - reference.float())[others].abs().max()
        assert float(gap) <= tolerance * float(reference.float()[others].abs().max())
    assert not all(bool(tensor[BROKEN].isfinite().all()) for tensor in (found[1], *mine.values()))


@pytest.mark.parametrize("where", ["input", "weights"])
def test_a_nan_passes_norm_relu_and_pool(where: str) -> None:
    """In its own channels alone, so that the loss of its host shows it."""
    from esper.kasmina.kernels.norm_pool import norm_relu_pool  # only CUDA builds include triton

    x, weight = torch.randn(4, 12, 6, 6, device="cuda"), torch.ones(12, device="cuda")
    wanted, *_ = norm_relu_pool(x, weight, torch.zeros_like(weight), 1e-5, 12)
    (x[0, 3, 1, 1] if where == "input" else weight[3]).fill_(torch.nan)
    found, mean, _ = norm_relu_pool(x, weight, torch.zeros_like(weight), 1e-5, 12)
    others = [channel for channel in range(12) if channel != 3]
    assert torch.equal(found[:, others], wanted[:, others])
    assert found[:, 3].isnan().all()
    assert bool(mean[3].isnan()) == (where == "input")


def test_padding_is_left_out_and_changes_nothing() -> None:
    """Rows that live have the same bits, forward and backward, whether the others are computed or not."""
    from esper.kasmina.kernels.norm_pool import norm_relu_pool

    generator = torch.Generator(device="cuda").manual_seed(6)
    x = torch.randn(9, 150, 8, 8, device="cuda", generator=generator)
    weight, bias = torch.randn(2, 150, device="cuda", generator=generator)
    lives = torch.tensor([True, False, True, True, False], device="cuda")

    def run() -> list[Tensor]:
        own, scale = x.clone().requires_grad_(), weight.clone().requires_grad_()
        pooled, *moments = norm_relu_pool(own, scale, bias, 1e-5, len(lives))
        pooled.square().sum().backward()
        assert own.grad is not None
        assert scale.grad is not None
        images = (part.unflatten(1, (5, 30)).transpose(0, 1) for part in (pooled.detach(), own.grad))
        return [*images, *(vector.view(5, 30) for vector in (scale.grad, *moments))]

    whole = run()
    with living_rows(lives):
        some = run()
    for found, wanted in zip(some, whole, strict=True):
        assert torch.equal(found[lives], wanted[lives])
