"""Small images on the CPU: products, norms and pools against torch's own functions, in float64, gradients included."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina import products
from esper.kasmina.layers import Conv2d
from esper.kasmina.norms import GroupNorm
from esper.kasmina.row_layout import is_lone_small, is_small, store_small

EPS = 1e-5


def noise(*shape: int, rng_seed: int = 0) -> Tensor:
    """Standard normal numbers that want a gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng_seed), dtype=torch.float64).requires_grad_()


def row_by_row(call: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """Apply torch's function for images (B, C, H, W) to every row of x (R, C, H, W, B)."""
    rows = [call(x[row].movedim(-1, 0), *(w[row] for w in weights)).movedim(0, -1) for row in range(len(x))]
    return torch.stack(rows)


def assert_equal(mine: Tensor, plain: Tensor, inputs: Sequence[Tensor]) -> None:
    """Values, and gradients of a sum with a factor for every number."""
    factors = noise(*mine.shape, rng_seed=9).detach()
    torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-12)
    ours, theirs = (torch.autograd.grad((y * factors).sum(), inputs) for y in (mine, plain))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("side", [1, 3, 5])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 4, 8, 8), (4, 3, 3, 5), (8, 8, 4, 4), (16, 6, 4, 4), (3, 2, 7, 2)])
@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (3, 6)])
def test_convolutions(shape: tuple[int, int, int, int], side: int, rows: int, batch: int) -> None:
    """By one product, or by the dense matrix."""
    inputs, outputs, height, width = shape
    x, weight = noise(rows, inputs, height, width, batch), noise(rows, outputs, inputs, side, side, rng_seed=1)
    plain = row_by_row(lambda image, kernel: F.conv2d(image, kernel, padding=side // 2), x, weight)
    assert_equal(products.convolve(x, weight), plain, [x, weight])


@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_convolutions(groups: int) -> None:
    x, weight = noise(3, 4, 5, 3, 2), noise(3, 8, 4 // groups, 3, 3, rng_seed=1)
    plain = row_by_row(lambda image, kernel: F.conv2d(image, kernel, padding=1, groups=groups), x, weight)
    assert_equal(products.convolve(x, weight, groups), plain, [x, weight])


def test_larger_convolutions_are_left_to_torch() -> None:
    """Rows and lone networks alike, to rounding."""
    layer = Conv2d(16, 4, 3)
    assert not products.suits(16, 16, 3, 1)
    x, weight = noise(3, 2, 16, 4, 4).detach(), noise(3, 4, 16, 3, 3, rng_seed=1).detach()
    rows = torch.func.functional_call(layer, {"weight": weight}, (x,))
    for row in range(3):
        torch.testing.assert_close(rows[row], F.conv2d(x[row], weight[row], padding=1))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batch", [1, 5])
def test_group_norm(groups: int, batch: int) -> None:
    x, weight, bias = noise(3, 4, 3, 2, batch), noise(3, 4, rng_seed=1), noise(3, 4, rng_seed=2)
    plain = row_by_row(lambda image, w, b: F.group_norm(image, groups, w, b, EPS), x, weight, bias)
    assert_equal(products.group_norm(x, weight, bias, groups, EPS), plain, [x, weight, bias])


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """torch's batch norm of every row."""
    return row_by_row(lambda image, w, b: F.batch_norm(image, None, None, w, b, True, 0.0, EPS), x, weight, bias)


def test_batch_norm_and_its_statistics() -> None:
    x, weight, bias = noise(3, 4, 3, 2, 5), noise(3, 4, rng_seed=1), noise(3, 4, rng_seed=2)
    y, mean, variance = products.batch_norm(x, weight, bias, EPS)
    assert_equal(y, plain_norm(x, weight, bias), [x, weight, bias])
    torch.testing.assert_close(mean, x.flatten(2).mean(2))
    torch.testing.assert_close(variance, x.flatten(2).var(2, correction=0))


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0], ids=["any sign", "flipped", "zero"])
def test_norm_relu_pool(sign: float) -> None:
    """Where a slope is negative the smallest pixel wins; where it is zero, all are equal and nothing flows back."""
    x, bias = noise(3, 4, 6, 4, 5), noise(3, 4, rng_seed=2)
    weight = (noise(3, 4, rng_seed=1).detach() * sign).requires_grad_()
    y, mean, variance = products.norm_relu_pool(x, weight, bias, EPS)
    plain = row_by_row(lambda image: F.max_pool2d(F.relu(image), 2), plain_norm(x, weight, bias))
    assert_equal(y, plain, [x, bias] if sign == 0 else [x, weight, bias])
    torch.testing.assert_close(mean, x.flatten(2).mean(2))
    torch.testing.assert_close(variance, x.flatten(2).var(2, correction=0))


@pytest.mark.parametrize("size", [(2, 2), (4, 6), (5, 3)])
def test_max_pool(size: tuple[int, int]) -> None:
    """The last line of an odd side is left out."""
    x = noise(2, 3, *size, 4)
    assert_equal(products.max_pool(x), row_by_row(lambda image: F.max_pool2d(image, 2), x), [x])


def test_the_gradient_of_a_pool_goes_to_the_first_of_equals() -> None:
    """Digits have backgrounds of one colour, so ties are common."""
    x = torch.randint(0, 2, (2, 3, 4, 4, 50), generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    assert_equal(products.max_pool(x), row_by_row(lambda image: F.max_pool2d(image, 2), x), [x])


def test_a_broken_row_breaks_no_other() -> None:
    x, weight = noise(3, 4, 4, 4, 5).detach(), noise(3, 4, 4, 3, 3, rng_seed=1).detach()
    whole = products.convolve(x, weight)
    x[1, 0, 0, 0, 0], weight[1, 0, 0, 0, 0] = float("nan"), float("inf")
    broken = products.convolve(x, weight)
    assert torch.equal(broken[0], whole[0]) and torch.equal(broken[2], whole[2])
    assert bool(broken[1].isnan().any())


@pytest.mark.parametrize("layer", [Conv2d(4, 6, 3), Conv2d(4, 4, 1), GroupNorm(2, 4)], ids=repr)
def test_a_lone_network_rounds_like_a_row(layer: torch.nn.Module) -> None:
    """To the bit, and its result is stored as torch stores images."""
    x = noise(5, 4, 4, 4).detach().float()
    assert is_lone_small(x)
    alone = layer(x)
    weights = {name: torch.stack([w, w + 1]) for name, w in layer.named_parameters()}
    rows = torch.func.functional_call(layer, weights, (torch.stack([x, x]),))
    assert is_small(rows) and store_small(rows).data_ptr() == rows.data_ptr(), "layers pass rows on without a copy"
    assert torch.equal(alone, rows[0])
    assert alone.is_contiguous()


def test_a_single_network_takes_products_for_tiny_images_alone() -> None:
    assert is_lone_small(torch.zeros(2, 8, 8, 8)) and not is_lone_small(torch.zeros(2, 9, 8, 8))


@pytest.mark.parametrize("layer", [GroupNorm(2, 4)], ids=repr)
def test_second_derivatives_are_refused(layer: torch.nn.Module) -> None:
    """Instead of being wrong."""
    x = noise(5, 4, 4, 4)
    (first,) = torch.autograd.grad(layer.double()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_recorders_and_transforms_see_torchs_own_functions() -> None:
    """Under vmap, torch.compile, tracing and autocast."""
    layer, x = Conv2d(4, 6, 3), noise(2, 5, 4, 4, 4).detach().float()
    expected = torch.stack([layer(part) for part in x])
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
    with pytest.warns(DeprecationWarning):
        traced = torch.jit.trace(layer, x[0])
    torch.testing.assert_close(traced(x[1]), expected[1])
    torch.testing.assert_close(torch.export.export(layer, (x[0],)).module()(x[1]), expected[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x[0]).dtype is torch.bfloat16
