"""The CUDA kernels of rows against the same layers in float64 on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.layers import Conv2d, GroupNorm, Scale
from esper.kasmina.row_layout import BACK, STORED, take_rows

pytestmark = pytest.mark.gpu

BATCH, SIDE = 6, 13
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "convolution": lambda width: Conv2d(width, width, 3),
    "wide convolution": lambda width: Conv2d(width, width, 5),
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
    x = rows_of(rows, width)
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
