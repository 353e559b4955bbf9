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
