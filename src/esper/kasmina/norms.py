"""Row-aware norms: one network, or R networks at once (`layers` says how).

BatchNorm returns the statistics of its batch instead of writing them, so the caller decides which rows may write.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import products
from esper.kasmina.layers import Layer, Statistics, lone, max_pool, per_channel
from esper.kasmina.row_layout import (
    BACK,
    STORED,
    fold_rows,
    from_small,
    has_kernels,
    is_lone_small,
    is_small,
    store_small,
    unfold_rows,
)


class _AffineNorm(Layer):
    """Weight one and bias zero per channel; running mean zero and variance one, if it has them."""

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        self.weight.fill_(1)
        self.bias.zero_()
        for name, buffer in self.named_buffers():
            buffer.fill_(name == "running_var")


class BatchNorm2d(_AffineNorm):
    """Batch normalisation that returns its statistics: `forward(x, train) -> (y, statistics)`."""

    __call__: Callable[..., tuple[Tensor, Statistics]]  # type: ignore[assignment]  # other layers return a tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, *, eps: float = 1e-5, masked: bool = False) -> None:
        super().__init__(width, eps=eps)
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.mask: Tensor | None
        # A mask over channels lets hosts of one fleet differ in their width: what is masked is zero.
        self.register_buffer("mask", torch.ones(width) if masked else None)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        super().reset(generator)
        if self.mask is not None:
            self.mask.fill_(1)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Weight and bias, zero where a channel is masked."""
        if self.mask is None:
            return self.weight, self.bias
        return self.weight * self.mask, self.bias * self.mask

    def forward(self, x: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        rows = self.weight.dim() == 2
        if is_small(x):
            return self._small(x, train)
        if is_lone_small(x):
            y, statistics = self._small(x[None], train)
            return lone(y), statistics
        folded = fold_rows(x) if rows else x
        if train:
            # With momentum 1 the kernel writes the batch's mean and unbiased variance into these two.
            like = self.running_mean
            mean, var = (torch.ones(like.shape, dtype=like.dtype, device=like.device) for _ in range(2))
        else:
            mean, var = self.running_mean, self.running_var
        weight, bias = (values.flatten() for values in self.affine())
        y = F.batch_norm(folded, mean.flatten(), var.flatten(), weight, bias, train, 1.0, self.eps)
        if rows:
            y = unfold_rows(y, x.shape[0])
        return y, {"running_mean": mean, "running_var": var} if train else {}

    def relu_pool(self, x: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        """The norm, ReLU and 2×2 max pooling. For rows this is a few kernels on CUDA, one pass on the CPU."""
        even = x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0
        fuses = train if is_small(x) else has_kernels(x) and (train or not torch.is_grad_enabled())
        if not (fuses and even and self.weight.dim() == 2):
            y, statistics = self(x, train)
            return F.relu(max_pool(y)), statistics  # in this order the ReLU has a quarter of the work
        if is_small(x):
            return self._small(x, train, pooled=True)
        from esper.kasmina.kernels.norm_pool import norm_relu_pool, scale_relu_pool  # needs triton

        shape, (weight, bias) = self.running_mean.shape, self.affine()
        if not train:
            slope = weight * (self.running_var + self.eps).rsqrt()
            offset = bias - self.running_mean * slope
            return unfold_rows(scale_relu_pool(fold_rows(x), slope.flatten(), offset.flatten()), len(x)), {}
        y, mean, var = norm_relu_pool(fold_rows(x), weight.flatten(), bias.flatten(), self.eps, len(x))
        return unfold_rows(y, len(x)), {"running_mean": mean.view(shape), "running_var": var.view(shape)}

    def _small(self, x: Tensor, train: bool, *, pooled: bool = False) -> tuple[Tensor, Statistics]:
        shape, stored = self.weight.shape, store_small(x).to(self.weight.dtype)
        weight, bias = (values.view(len(x), -1) for values in self.affine())
        if not train:
            slope = weight * (self.running_var.view_as(weight) + self.eps).rsqrt()
            offset = bias - self.running_mean.view_as(weight) * slope
            slope, offset = (values[..., None, None, None] for values in (slope, offset))
            return from_small(torch.addcmul(offset, stored, slope).to(x.dtype)), {}
        norm = products.norm_relu_pool if pooled else products.batch_norm
        y, mean, variance = norm(stored, weight, bias, self.eps)
        count = stored[0, 0].numel()
        unbiased = variance * (count / max(count - 1, 1))
        return from_small(y.to(x.dtype)), {"running_mean": mean.view(shape), "running_var": unbiased.view(shape)}


class GroupNorm(_AffineNorm):
    """Group normalisation of images."""

    def __init__(self, groups: int, width: int, *, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if is_lone_small(x):
            return lone(self._small(x[None], self.weight[None], self.bias[None]))
        if self.weight.dim() == 1:
            if torch.is_grad_enabled() and not x.requires_grad and not x.is_contiguous():
                x = x.contiguous()  # torch 2.13 crashes in the backward pass of channels-last input without gradient
            return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        if is_small(x):
            return self._small(x, self.weight, self.bias)
        rows, group_width = x.shape[0], self.width // self.groups
        if has_kernels(x) and group_width & (group_width - 1) == 0:
            from esper.kasmina.kernels.rows import group_norm_stored

            stored = x.permute(STORED["cuda"])
            return group_norm_stored(stored, self.weight, self.bias, self.groups, self.eps).permute(BACK["cuda"])
        # Each row's channels are contiguous, so its groups are too.
        y = F.group_norm(fold_rows(x), rows * self.groups, self.weight.flatten(), self.bias.flatten(), self.eps)
        return unfold_rows(y, rows)

    def _small(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return from_small(products.group_norm(store_small(x), weight, bias, self.groups, self.eps))


class LayerNorm(_AffineNorm):
    """Layer normalisation of the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), eps=self.eps) * per_channel(self.weight, x) + per_channel(self.bias, x)
