"""Small images of R networks on the CPU: convolutions as batched matrix products, norms and pools.

Images are stored as (R, C, H, W, B), the batch innermost. A 1×1 convolution is then one product per row. So is a larger
kernel on few pixels, with the dense matrix that maps all pixels to all pixels:

    y[(o, p), b] = Σ_{i, q} K[(o, p), (i, q)] · x[(i, q), b],    K[(o, p), (i, q)] = weight[o, i, tap from p to q]

Each product works on one row, so the bits of a row do not depend on the number of rows. Grouped convolutions of torch
are up to ten times slower at these sizes. Where the matrix would be large, they are faster (`suits`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DENSE = 192  # channels × pixels up to which the dense matrix is faster than a grouped convolution
FEW = 4  # pixels for which it is also faster within groups, whatever their number


def suits(channels: int, pixels: int, side: int, groups: int) -> bool:
    """Whether a convolution of this size is faster as a product."""
    return (side == 1 and groups == 1) or channels * pixels <= DENSE or (groups > 1 and pixels <= FEW)


def convolve(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """x (R, C, H, W, B), weight (R, O, C / groups, k, k) with odd k → (R, O, H, W, B), "same" padding."""
    rows, outputs, inputs, side, _ = weight.shape
    _, _, height, width, batch = x.shape
    kernels = weight.reshape(rows * groups, outputs // groups, inputs, side, side)
    matrix = kernels.flatten(2) if side == 1 else dense_matrix(kernels, height, width)
    return torch.bmm(matrix, x.reshape(rows * groups, matrix.shape[2], -1)).view(rows, outputs, height, width, batch)


def dense_matrix(weight: Tensor, height: int, width: int) -> Tensor:
    """weight (R, O, I, k, k) → (R, O·H·W, I·H·W)."""
    rows, outputs, inputs, side, _ = weight.shape
    table = tap_table(side, height, width).to(weight).expand(rows, -1, -1)
    taps = torch.bmm(weight.reshape(rows, outputs * inputs, side * side), table)
    pixels = height * width
    return taps.view(rows, outputs, inputs, pixels, pixels).transpose(2, 3).reshape(rows, outputs * pixels, -1)


@lru_cache(maxsize=64)
def tap_table(side: int, height: int, width: int) -> Tensor:
    """(k², pixels²): 1 where a tap leads from an output pixel to an input pixel."""
    table = torch.zeros(side, side, height, width, height, width)
    reach = range(-(side // 2), side // 2 + 1)
    for y in range(height):
        for x in range(width):
            for down in reach:
                for right in reach:
                    if 0 <= y + down < height and 0 <= x + right < width:
                        table[down + side // 2, right + side // 2, y, x, y + down, x + right] = 1
    return table.view(side * side, (height * width) ** 2)


class _GroupNorm(torch.autograd.Function):
    """With x̂ = (x − mean) / √(var + eps) over the channels and pixels of a group: weight · x̂ + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        rows, channels, *_, batch = x.shape
        grouped = x.view(rows * groups, -1, batch)
        centred = grouped - grouped.mean(1, keepdim=True)
        scale = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
        normal = centred.mul_(scale).view(rows, channels, -1)
        ctx.save_for_backward(normal, scale, weight)
        return torch.addcmul(bias[..., None], normal, weight[..., None]).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        shape, gradient = gradient.shape, gradient.reshape(normal.shape)
        product = gradient * normal
        to_weight, to_bias = product.sum(2), gradient.sum(2)
        # dx = scale · (a − mean(a) − x̂ · mean(a·x̂)) with a = weight · gradient
        grouped = (len(scale), -1, scale.shape[-1])
        a = (gradient * weight[..., None]).view(grouped)
        along = product.mul_(weight[..., None]).view(grouped).mean(1, keepdim=True)
        to_x = a.sub_(a.mean(1, keepdim=True)).sub_(normal.view(grouped) * along).mul_(scale)
        return to_x.view(shape), to_weight, to_bias, None, None


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """x (R, C, H, W, B), weight and bias (R, C), `groups` of each row. Statistics are at least in single precision."""
    if x.dtype.itemsize < 4:
        return group_norm(x.float(), weight.float(), bias.float(), groups, eps).to(x.dtype)
    return _GroupNorm.apply(x, weight, bias, groups, eps)  # type: ignore[no-any-return, no-untyped-call]


class _BatchNorm(torch.autograd.Function):
    """weight · x̂ + bias with x̂ = (x − mean) / √(var + eps), over pixels and batch; also the mean and the variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        centred, mean, variance = _centre(x)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(centred, scale, weight * scale)
        ctx.mark_non_differentiable(mean, variance)
        return torch.addcmul(bias[..., None], centred, (weight * scale)[..., None]).view(x.shape), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        centred, scale, slope = ctx.saved_tensors
        shape, gradient = gradient.shape, gradient.reshape(centred.shape)
        to_bias, to_weight = gradient.sum(2), (gradient * centred).sum(2) * scale
        to_x = _through_statistics(centred, scale, slope, to_weight, to_bias).addcmul_(gradient, slope[..., None])
        return to_x.view(shape), to_weight, to_bias, None


def _centre(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x − mean (R, C, pixels and batch), the mean and the biased variance (R, C)."""
    flat = x.flatten(2)
    mean = flat.sum(2) / flat.shape[2]
    centred = flat - mean[..., None]
    return centred, mean, centred.square().sum(2) / flat.shape[2]


def _through_statistics(centred: Tensor, scale: Tensor, slope: Tensor, to_weight: Tensor, to_bias: Tensor) -> Tensor:
    """The part of a norm's gradient that flows through mean and variance: −slope · (Σg + x̂ · Σ(g·x̂)) / n."""
    shares = slope / -centred.shape[2]
    return torch.addcmul((shares * to_bias)[..., None], centred, (shares * to_weight * scale)[..., None])


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, C, H, W, B) normalised by its own statistics, the mean and the biased variance (R, C)."""
    return _BatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


class _NormReluPool(torch.autograd.Function):
    """relu(batch_norm(x)), pooled by 2×2. An affine map of x has its largest value where ±x has, so only the winner of
    each window is normalised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        centred, mean, variance = _centre(x)
        scale = (variance + eps).rsqrt()
        slope, shape = weight * scale, (*weight.shape, 1, 1, 1)
        sign, image = slope.sign(), centred.view(x.shape)
        signed = image * sign.view(shape) if bool((sign < 0).any()) else image
        # A pass without gradients (calibration) needs no choices.
        best, *choices = _choose(signed) if any(ctx.needs_input_grad[:3]) else (_largest(signed),)
        y = torch.addcmul(bias.view(shape), best, slope.abs().view(shape)).relu_()
        ctx.save_for_backward(centred, best, y, scale, slope, sign, *choices)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        centred, best, y, scale, slope, sign, *choices = ctx.saved_tensors
        shape = (*y.shape[:2], *(2 * side for side in y.shape[2:4]), y.shape[4])
        gradient = gradient * (y > 0)
        to_bias = gradient.flatten(2).sum(2)
        to_weight = (gradient * best).flatten(2).sum(2) * (scale * sign)
        to_x = _through_statistics(centred, scale, slope, to_weight, to_bias).view(shape)
        for corner, part in zip(
            _corners(to_x), _divide(gradient * slope.view(*slope.shape, 1, 1, 1), choices), strict=True
        ):
            corner.add_(part)
        return to_x, to_weight, to_bias, None


def norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, C, H, W, B) → relu(batch_norm(x)) pooled by 2×2, the mean and the biased variance; H and W are even."""
    return _NormReluPool.apply(x, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


class _MaxPool(torch.autograd.Function):
    """The maximum over 2×2 pixels. The gradient goes to the first of equals, as in torch's own pool."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        best, *choices = _choose(x)
        ctx.save_for_backward(*choices)
        ctx.shape = x.shape
        return best

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        to_x = gradient.new_zeros(ctx.shape)
        for corner, part in zip(_corners(to_x), _divide(gradient, ctx.saved_tensors), strict=True):
            corner.copy_(part)
        return to_x


def _corners(x: Tensor) -> tuple[Tensor, ...]:
    """The four pixels of every window; an odd last line belongs to none."""
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    return tuple(x[:, :, down:height:2, right:width:2] for down in (0, 1) for right in (0, 1))


def _largest(x: Tensor) -> Tensor:
    """The largest pixel of each window."""
    a, b, c, d = _corners(x)
    return torch.maximum(torch.maximum(a, b), torch.maximum(c, d))


def _choose(x: Tensor) -> tuple[Tensor, ...]:
    """The largest pixel of each window, and three choices: lower or upper line, right or left in each.

    A choice is 1 for the first of these and else 0, in x's type, because products with booleans are slow.
    """
    a, b, c, d = _corners(x)
    upper, lower = torch.maximum(a, b), torch.maximum(c, d)
    return torch.maximum(upper, lower), *(one.to(x.dtype) for one in (lower > upper, b > a, d > c))


def _divide(gradient: Tensor, choices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of each corner."""
    low, upper_right, lower_right = choices
    below = gradient * low
    above = gradient - below
    b, d = above * upper_right, below * lower_right
    return above - b, b, below - d, d


def max_pool(x: Tensor) -> Tensor:
    """(R, C, H, W, B) → (R, C, H/2, W/2, B)."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _largest(x)
    return _MaxPool.apply(x)  # type: ignore[no-any-return, no-untyped-call]
