"""Layers that are one network, or R networks at once.

A module built from these layers is an ordinary module while its weights have their own shape. Called through
`torch.func.functional_call` with weights that carry a leading row axis, and an input `(rows, batch, …)`, it is R
networks side by side. Hosts and blueprints are therefore written once and serve a single network, a fleet and the
exported model. A layer knows which of the two it is from the number of axes of its weights.

How the images of R rows lie in memory is the matter of `row_layout`.

Whether a call trains is an argument of the call, and BatchNorm returns the statistics of its batch instead of writing
them: the caller decides which rows may write (`write_statistics`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from esper.kasmina.row_layout import BACK, STORED, fold_rows, has_kernels, unfold_rows

Statistics = dict[str, Tensor]
"""Buffer name → the value which this batch alone would give it."""

BATCH_NORM_MOMENTUM = 0.1


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (C,) or (R, C) so that it multiplies channels: axis -3 of images, the last axis of tokens and vectors.

    Rows show in the axes of `values`; what remains of `like` is (B, C, H, W), (B, T, C) or (B, C).
    """
    rows = values.dim() - 1
    spatial = 2 if like.dim() - rows == 4 else 0
    middle = like.dim() - rows - 1 - spatial
    return values.reshape(*values.shape[:-1], *([1] * middle), values.shape[-1], *([1] * spatial))


def named_statistics(prefix: str, statistics: Statistics) -> Statistics:
    """The statistics of a child under its name in the parent."""
    return {f"{prefix}.{name}": value for name, value in statistics.items()}


@torch.no_grad()
def write_statistics(module: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    """Move the running statistics of `module` towards those of a batch."""
    for name, value in statistics.items():
        module.get_buffer(name).lerp_(value, BATCH_NORM_MOMENTUM)


def max_pool(x: Tensor, size: int = 2) -> Tensor:
    """Max pooling of images of one network or of rows."""
    if x.dim() == 5:
        return unfold_rows(F.max_pool2d(fold_rows(x), size), x.shape[0])
    return F.max_pool2d(x, size)


def reset_parameters(module: nn.Module, rng_seed: int) -> None:
    """Draw all weights of `module` anew: a pure function of the seed and of the order of its layers."""
    generator = torch.Generator().manual_seed(rng_seed)
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.reset(generator)


class Layer(nn.Module):
    """A layer that can draw its own initial weights."""

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Set parameters and buffers to what they are at birth."""
        raise NotImplementedError


def is_row_aware(module: nn.Module) -> bool:
    """Whether all its weights lie in layers of ours, which take rows as they are."""
    owners = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    return all(isinstance(part, Layer) for part in owners)


class RowCall:
    """R networks at once: natively, or for foreign layers through `vmap`, which is slower."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.native = is_row_aware(module)

    def __call__(self, state: Mapping[str, Tensor], h: Tensor, *arguments: Any) -> Any:  # Any: what the module gives
        """Call with weights and buffers (R, …) and h (R, B, …)."""
        if self.native:
            return functional_call(self.module, dict(state), (h, *arguments))
        return vmap(lambda one, x: functional_call(self.module, one, (x, *arguments)))(dict(state), h)


@torch.no_grad()
def _uniform(parameter: Tensor, bound: float, generator: torch.Generator | None) -> None:
    """Fill with U(-bound, bound), drawn on the CPU in float64 so that dtype and device do not change the draw."""
    draw = torch.rand(parameter.shape, dtype=torch.float64, generator=generator)
    parameter.copy_(draw.mul_(2 * bound).sub_(bound))


class Conv2d(Layer):
    """Convolution with stride 1 that keeps the resolution; odd kernels, no bias (a norm follows everywhere)."""

    __call__: Callable[..., Tensor]

    def __init__(self, inputs: int, outputs: int, kernel_size: int, *, groups: int = 1, masked: bool = False) -> None:
        super().__init__()
        self.inputs, self.outputs, self.kernel_size, self.groups = inputs, outputs, kernel_size, groups
        self.weight = nn.Parameter(torch.empty(outputs, inputs // groups, kernel_size, kernel_size))
        self.mask: Tensor | None
        # A mask of the kernel's taps lets hosts of one fleet differ in what they can see.
        self.register_buffer("mask", torch.ones(kernel_size, kernel_size) if masked else None)
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        _uniform(self.weight, 1 / math.sqrt(self.weight[0].numel()), generator)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.mask is not None:
            weight = weight * (self.mask if weight.dim() == 4 else self.mask[:, None, None])
        if weight.dim() == 4:
            return F.conv2d(x, weight, padding=self.kernel_size // 2, groups=self.groups)
        if has_kernels(x) and self.groups == 1:
            return self._cuda_rows(x, weight)
        return self._grouped(x, weight)

    def _grouped(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = weight.shape[0]
        y = F.conv2d(fold_rows(x), weight.flatten(0, 1), padding=self.kernel_size // 2, groups=rows * self.groups)
        return unfold_rows(y, rows)

    def _cuda_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """cuDNN's grouped kernels are fast only where a row has as many channels in as out, and not for 1×1.

        Elsewhere they run row by row. So 1×1 is a kernel of ours, and other sizes are filled up with zero channels.
        """
        from esper.kasmina.kernels.host_blocks import (  # triton comes with CUDA builds only
            mix_channels,
            resize_channels,
        )

        stored = x.permute(STORED["cuda"])  # channels are the last axis of memory
        if self.kernel_size == 1:
            return mix_channels(stored, weight.flatten(2)).permute(BACK["cuda"])
        if self.inputs == self.outputs:
            return self._cuda_same(x, weight)
        size = max(self.inputs, self.outputs)
        weight = F.pad(weight, (0, 0, 0, 0, 0, size - self.inputs, 0, size - self.outputs))
        y = self._cuda_same(resize_channels(stored, size).permute(BACK["cuda"]), weight)
        if self.outputs == size:
            return y
        return resize_channels(y.permute(STORED["cuda"]), self.outputs).permute(BACK["cuda"])

    def _cuda_same(self, x: Tensor, weight: Tensor) -> Tensor:
        from esper.kasmina.kernels.rows import same_conv

        rows = weight.shape[0]
        return unfold_rows(same_conv(fold_rows(x), weight.flatten(0, 1), rows), rows)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, kernel_size={self.kernel_size}, groups={self.groups}"


class Linear(Layer):
    """Affine map of the last axis."""

    __call__: Callable[..., Tensor]

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        bound = 1 / math.sqrt(self.inputs)
        _uniform(self.weight, bound, generator)
        if self.bias is not None:
            _uniform(self.bias, bound, generator)

    def forward(self, x: Tensor) -> Tensor:
        # One network goes through the batched product too: the plain one rounds differently, and a few layers of that
        # move gradients in float32 by 1e-5.
        single = self.weight.dim() == 2
        weight = self.weight[None] if single else self.weight
        bias = self.bias[None] if single and self.bias is not None else self.bias
        flat = x.reshape(weight.shape[0], -1, self.inputs)
        weight = weight.transpose(1, 2)
        y = flat @ weight if bias is None else torch.baddbmm(bias[:, None], flat, weight)
        return y.view(*x.shape[:-1], self.outputs)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, bias={self.bias is not None}"


class BatchNorm2d(Layer):
    """Batch normalisation that returns its statistics: `forward(x, train) -> (y, statistics)`."""

    __call__: Callable[..., tuple[Tensor, Statistics]]
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.register_buffer("running_mean", torch.empty(width))
        self.register_buffer("running_var", torch.empty(width))
        self.reset()

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        self.weight.fill_(1)
        self.bias.zero_()
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def forward(self, x: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        rows = self.weight.dim() == 2
        folded = fold_rows(x) if rows else x
        if train:
            # With momentum 1 the kernel leaves the batch's own mean and (unbiased) variance in these two.
            like = self.running_mean
            mean, var = (torch.ones(like.shape, dtype=like.dtype, device=like.device) for _ in range(2))
        else:
            mean, var = self.running_mean, self.running_var
        y = F.batch_norm(
            folded, mean.flatten(), var.flatten(), self.weight.flatten(), self.bias.flatten(), train, 1.0, self.eps
        )
        if rows:
            y = unfold_rows(y, x.shape[0])
        return y, {"running_mean": mean, "running_var": var} if train else {}

    def relu_pool(self, x: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        """The norm, ReLU and 2×2 max pooling: for rows on CUDA one kernel instead of five passes."""
        even = x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0
        if not (train and even and x.device.type == "cuda" and self.weight.dim() == 2):
            y, statistics = self(x, train)
            return max_pool(F.relu(y)), statistics
        from esper.kasmina.kernels.host_blocks import norm_relu_pool  # needs triton, which only CUDA builds bring along

        y, mean, var = norm_relu_pool(fold_rows(x), self.weight.flatten(), self.bias.flatten(), self.eps)
        shape = self.running_mean.shape
        return unfold_rows(y, x.shape[0]), {"running_mean": mean.view(shape), "running_var": var.view(shape)}

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class _AffineNorm(Layer):
    """Weight one and bias zero per channel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset()

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        self.weight.fill_(1)
        self.bias.zero_()


class GroupNorm(_AffineNorm):
    """Group normalisation of images."""

    __call__: Callable[..., Tensor]

    def __init__(self, groups: int, width: int, *, eps: float = 1e-5) -> None:
        super().__init__(width, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        rows, wide = x.shape[0], self.width // self.groups
        if has_kernels(x) and wide & (wide - 1) == 0:
            from esper.kasmina.kernels.rows import group_norm_stored

            stored = x.permute(STORED["cuda"])
            return group_norm_stored(stored, self.weight, self.bias, self.groups, self.eps).permute(BACK["cuda"])
        # Each row's channels are contiguous, so its groups are too.
        y = F.group_norm(fold_rows(x), rows * self.groups, self.weight.flatten(), self.bias.flatten(), self.eps)
        return unfold_rows(y, rows)

    def extra_repr(self) -> str:
        return f"{self.groups}, {self.width}, eps={self.eps}"


class LayerNorm(_AffineNorm):
    """Layer normalisation of the last axis."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), eps=self.eps) * per_channel(self.weight, x) + per_channel(self.bias, x)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class Embedding(Layer):
    """Table look-up: ids (B, T) → (B, T, width), or (R, B, T) → (R, B, T, width)."""

    __call__: Callable[..., Tensor]

    def __init__(self, entries: int, width: int, *, std: float = 0.02) -> None:
        super().__init__()
        self.entries, self.width, self.std = entries, width, std
        self.weight = nn.Parameter(torch.empty(entries, width))
        self.reset()

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        draw = torch.randn(self.weight.shape, dtype=torch.float64, generator=generator)
        self.weight.copy_(draw.mul_(self.std))

    def forward(self, ids: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        offset = torch.arange(rows, device=ids.device).mul_(self.entries).reshape(rows, *[1] * (ids.dim() - 1))
        return F.embedding(ids + offset, self.weight.flatten(0, 1))

    def extra_repr(self) -> str:
        return f"{self.entries}, {self.width}"


class SelfAttention(nn.Module):
    """Causal self-attention of (…, T, width). No key bias: softmax cancels it, so it could never learn."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(width, width)
        self.key = Linear(width, width, bias=False)
        self.value = Linear(width, width)
        self.out = Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for p in (self.query, self.key, self.value))
        q, k, v = (part.reshape(-1, *part.shape[-3:]) for part in (q, k, v))  # rows join the batch
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(-2, -3).flatten(-2).view(h.shape))


class Scale(Layer):
    """A factor per channel, zero at birth: whatever it closes is silent then, yet has a gradient to open by."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.reset()

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        self.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if has_kernels(x) and self.weight.dim() == 2:
            from esper.kasmina.kernels.rows import scale_stored

            return scale_stored(x.permute(STORED["cuda"]), self.weight).permute(BACK["cuda"])
        return x * per_channel(self.weight, x)
