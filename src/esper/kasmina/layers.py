"""Row-aware layers: one network, or R networks at once.

With weights of their own shape they form an ordinary module. Through `torch.func.functional_call`, with weights that
carry a leading row axis and inputs `(rows, batch, …)`, they form R networks side by side. So hosts and blueprints are
written once for a single network, a fleet and the exported model. `row_layout` knows how images of R rows are stored.

Training mode is an argument of the call. BatchNorm returns the statistics of its batch instead of writing them, so the
caller decides which rows may write (`write_statistics`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from esper.kasmina import products
from esper.kasmina.row_hints import tiles_of
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

Statistics = dict[str, Tensor]
"""Buffer name → its value for this batch alone."""

BATCH_NORM_MOMENTUM = 0.1


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (C,) or (R, C) to multiply the channels of `like`: axis -3 of images, the last of tokens and vectors."""
    rows = values.dim() - 1
    spatial = 2 if like.dim() - rows == 4 else 0
    middle = like.dim() - rows - 1 - spatial
    return values.reshape(*values.shape[:-1], *([1] * middle), values.shape[-1], *([1] * spatial))


def named_statistics(prefix: str, statistics: Statistics) -> Statistics:
    """Statistics of a child under its name in the parent."""
    return {f"{prefix}.{name}": value for name, value in statistics.items()}


@torch.no_grad()
def write_statistics(module: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    """Move the running statistics of `module` towards those of a batch."""
    for name, value in statistics.items():
        module.get_buffer(name).lerp_(value, BATCH_NORM_MOMENTUM)


def max_pool(x: Tensor, size: int = 2) -> Tensor:
    """Max-pool images of one network or of rows."""
    if is_small(x) and size == 2:
        return from_small(products.max_pool(store_small(x)))
    if x.dim() == 5:
        return unfold_rows(F.max_pool2d(fold_rows(x), size), x.shape[0])
    return F.max_pool2d(x, size)


def lone(x: Tensor) -> Tensor:
    """The only row of x, stored as torch stores images: whoever reads it may want to view it otherwise."""
    return x[0].contiguous()


def reset_parameters(module: nn.Module, rng_seed: int) -> None:
    """Redraw all weights of `module`; depends only on the seed and the order of its layers."""
    generator = torch.Generator().manual_seed(rng_seed)
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.reset(generator)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def cloned_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers by name."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


class Layer(nn.Module):
    """A layer that can draw its own initial weights."""

    __call__: Callable[..., Tensor]

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Initialise parameters and buffers."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        return ", ".join(f"{name}={value}" for name, value in numbers.items() if name != "training")


class RowCall:
    """Runs R networks at once: natively, or through `vmap` (slower) if weights belong to foreign layers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        owners = (part for part in module.modules() if next(part.parameters(recurse=False), None) is not None)
        self.native = all(isinstance(part, Layer) for part in owners)
        # By name, the dictionary that holds a tensor, and its key there.
        self._places = {
            f"{prefix}.{name}" if prefix else name: (tensors, name)
            for prefix, part in module.named_modules()
            for tensors in (part._parameters, part._buffers)
            for name in tensors
        }

    def __call__(self, state: Mapping[str, Tensor], h: Tensor, *arguments: Any) -> Any:  # Any: what the module returns
        """Call with weights and buffers (R, …) and h (R, B, …)."""
        if not self.native:
            return vmap(lambda one, x: functional_call(self.module, one, (x, *arguments)))(dict(state), h)
        # What `functional_call` does, at a tenth of its cost: a minibatch has dozens of such calls.
        places = [self._places[name] for name in state]
        own = [tensors[name] for tensors, name in places]
        try:
            for (tensors, name), value in zip(places, state.values(), strict=True):
                tensors[name] = value
            return self.module(h, *arguments)
        finally:
            for (tensors, name), value in zip(places, own, strict=True):
                tensors[name] = value


@torch.no_grad()
def _uniform(parameter: Tensor, bound: float, generator: torch.Generator | None) -> None:
    """Fill with U(-bound, bound), drawn on the CPU in float64, so that dtype and device do not change the draw."""
    draw = torch.rand(parameter.shape, dtype=torch.float64, generator=generator)
    parameter.copy_(draw.mul_(2 * bound).sub_(bound))


class Conv2d(Layer):
    """Convolution with stride 1 and "same" padding; odd kernels, no bias because a norm follows."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, *, groups: int = 1, masked: bool = False) -> None:
        super().__init__()
        self.inputs, self.outputs, self.kernel_size, self.groups = inputs, outputs, kernel_size, groups
        self.weight = nn.Parameter(torch.empty(outputs, inputs // groups, kernel_size, kernel_size))
        self.mask: Tensor | None
        # A mask over kernel taps lets hosts of one fleet differ in what they can see.
        self.register_buffer("mask", torch.ones(kernel_size, kernel_size) if masked else None)
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        _uniform(self.weight, 1 / math.sqrt(self.weight[0].numel()), generator)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.mask is not None:
            weight = weight * (self.mask if weight.dim() == 4 else self.mask[:, None, None])
        if weight.dim() == 4:
            if is_lone_small(x) and self._suits(x):
                return lone(self._small(x[None], weight[None]))
            return F.conv2d(x, weight, padding=self.kernel_size // 2, groups=self.groups)
        if is_small(x) and self._suits(x):
            return self._small(x, weight)
        if has_kernels(x) and (self.groups == 1 or self.inputs == self.outputs):
            return self._cuda_rows(x, weight)
        rows = weight.shape[0]
        y = F.conv2d(fold_rows(x), weight.flatten(0, 1), padding=self.kernel_size // 2, groups=rows * self.groups)
        return unfold_rows(y, rows)

    def _suits(self, x: Tensor) -> bool:
        return products.suits(self.inputs, x.shape[-2] * x.shape[-1], self.kernel_size, self.groups)

    def _small(self, x: Tensor, weight: Tensor) -> Tensor:
        return from_small(products.convolve(store_small(x), weight, self.groups))

    def _cuda_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve rows on CUDA, where cuDNN runs most grouped convolutions row by row.

        It is fast only with as many channels in as out, and not for 1×1. So 1×1 and the first layer use Triton kernels,
        and other convolutions are padded with zero channels. A row that is not finite would reach its neighbours: cuDNN
        reads zeros in its place, and its weights become NaN instead.
        """
        # Only CUDA builds include triton.
        from esper.kasmina.kernels.first_layer import MOST_TAPS, input_conv
        from esper.kasmina.kernels.host_blocks import mix_channels, resize_channels
        from esper.kasmina.kernels.rows import same_conv

        tiles = tiles_of(x)
        if tiles is not None and self.groups == 1 and self.inputs * self.kernel_size**2 <= MOST_TAPS:
            return input_conv(x, weight, tiles).permute(BACK["cuda"])
        stored, rows = x.permute(STORED["cuda"]), weight.shape[0]  # channels are the last axis of memory
        if self.kernel_size == 1 and self.groups == 1:
            return mix_channels(stored, weight.flatten(2)).permute(BACK["cuda"])
        groups, size = rows * self.groups, max(self.inputs, self.outputs) // self.groups
        if self.inputs != self.outputs:
            weight = F.pad(weight, (0, 0, 0, 0, 0, size - self.inputs, 0, size - self.outputs))
        marks = weight.new_zeros(2, groups)
        finite = resize_channels(stored.unflatten(-1, (self.groups, -1)).flatten(-3, -2), size, marks[0])
        kernels = weight.flatten(0, 1).unflatten(0, (groups, size))
        y = same_conv(finite.flatten(-2).permute(0, 3, 1, 2), kernels, marks)
        y = y.permute(0, 2, 3, 1).unflatten(-1, (rows, size * self.groups))
        return resize_channels(y, self.outputs).permute(BACK["cuda"])


class Linear(Layer):
    """Affine map of the last axis."""

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
        # One network uses the batched product too: the plain one rounds differently, and after a few layers float32
        # gradients differ by 1e-5.
        single = self.weight.dim() == 2
        weight = self.weight[None] if single else self.weight
        bias = self.bias[None] if single and self.bias is not None else self.bias
        flat = x.reshape(weight.shape[0], -1, self.inputs)
        weight = weight.transpose(1, 2)
        y = flat @ weight if bias is None else torch.baddbmm(bias[:, None], flat, weight)
        return y.view(*x.shape[:-1], self.outputs)


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


class Embedding(Layer):
    """Table lookup: ids (B, T) → (B, T, width), or (R, B, T) → (R, B, T, width)."""

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


class SelfAttention(nn.Module):
    """Causal self-attention of (…, T, width). No key bias: softmax cancels it, so it could never learn."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(width, width)
        self.key = Linear(width, width, bias=False)
        self.value = Linear(width, width)
        self.out = Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self._heads_of(self.query(h)), self._heads_of(self.key(h)), self._heads_of(self.value(h))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(-2, -3).flatten(-2).view(h.shape))

    def _heads_of(self, x: Tensor) -> Tensor:
        """(…, T, width) → (batch, heads, T, width of a head); rows join the batch."""
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return heads.reshape(-1, self.heads, x.shape[-2], x.shape[-1] // self.heads)


class Scale(Layer):
    """A factor per channel, zero at birth: it silences a seed, but has a gradient that can open it."""

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
