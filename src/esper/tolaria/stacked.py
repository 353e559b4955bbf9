"""Stacked networks and their optimisers: every tensor carries a leading member axis, and so does everything about it.

All tensors of a network lie side by side in one matrix (members, parameters), so an optimiser step is a dozen kernels
whatever the network. Equal to `torch.optim.SGD` and `AdamW` per member. Clipping, rates, step counts and who takes part
are per member too; a member that does not take part, or whose gradient is not finite, keeps its weights and its state.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from esper.kasmina.optimiser import CLIP_EPS
from esper.tolaria.tasks import OptimiserConfig

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


def per_member(values: Tensor, like: Tensor) -> Tensor:
    """(M,) reshaped to multiply (M, …)."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


class StackedWeights:
    """The parameters of M networks of one shape: `matrix` (M, P), and `leaves` that are views of it, by name."""

    def __init__(self, members: int, shapes: Mapping[str, Size], device: torch.device, dtype: torch.dtype) -> None:
        sizes = [shape.numel() for shape in shapes.values()]
        self.matrix = torch.zeros(members, sum(sizes), device=device, dtype=dtype)
        self.shapes = dict(shapes)
        self.leaves: dict[str, Tensor] = {}
        self.columns: dict[str, slice] = {}
        start = 0
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            self.columns[name] = slice(start, start + size)
            self.leaves[name] = self.matrix[:, start : start + size].view(members, *shape).requires_grad_()
            start += size

    def __len__(self) -> int:
        return len(self.matrix)

    @torch.no_grad()
    def write(self, member: int, values: Mapping[str, Tensor]) -> None:
        """Set all parameters of one member."""
        for name, columns in self.columns.items():
            self.matrix[member, columns] = values[name].detach().to(self.matrix).flatten()

    def gradient(self) -> Tensor:
        """(M, P); zeros where a backward pass did not come by."""
        parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves.values()]
        return torch.cat([part.reshape(len(self), -1) for part in parts], 1)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None


class _Take(torch.autograd.Function):
    """The parameters of some members, by tensor, contiguous. Backwards one sum into the matrix instead of one each."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, shapes: tuple[Size, ...], members: Tensor, learns: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(members, learns)
        ctx.like = whole
        taken = whole.index_select(0, members).to(dtype)
        parts = taken.split([shape.numel() for shape in shapes], 1)
        return tuple(part.contiguous().view(-1, *shape) for part, shape in zip(parts, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        members, learns = ctx.saved_tensors
        joined = torch.cat([gradient.reshape(len(members), -1) for gradient in gradients], 1)
        joined = joined.to(ctx.like.dtype).where(learns[:, None], 0.0)
        return torch.zeros_like(ctx.like).index_add_(0, members, joined), None, None, None, None


class MemberWeights(StackedWeights):
    """Stacked weights of which a pass takes some members."""

    def __init__(self, members: int, shapes: Mapping[str, Size], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(members, shapes, device, dtype)
        self.leaves = {name: leaf.detach() for name, leaf in self.leaves.items()}
        self.whole = self.matrix.detach().requires_grad_()
        """The matrix, where gradients gather."""

    def take(self, members: Tensor, learns: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """By name (E, …); a gradient comes back where a member `learns` (E,)."""
        parts = _Take.apply(self.whole, tuple(self.shapes.values()), members, learns, dtype)  # type: ignore[no-untyped-call]  # torch does not say
        return dict(zip(self.shapes, parts, strict=True))

    def gradient(self) -> Tensor:
        """(M, P); zeros where a backward pass did not come by."""
        return torch.zeros_like(self.matrix) if self.whole.grad is None else self.whole.grad

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.whole.grad = None


class StepNorms(NamedTuple):
    """Per member: the gradient's norm before clipping, and the update's relative to that of the weights."""

    gradient: Tensor
    update_ratio: Tensor


class StackedOptimizer:
    """The optimiser state of stacked weights."""

    def __init__(self, config: OptimiserConfig, weights: StackedWeights) -> None:
        self.config, self.weights = config, weights
        names = ("momentum",) if config.kind == "sgd" else ("mean", "square")
        self.state = {name: torch.zeros_like(weights.matrix) for name in names}
        self.steps = weights.matrix.new_zeros(len(weights))

    @torch.no_grad()
    def step(self, rates: Tensor, takes_part: Tensor, used: Tensor | None = None) -> StepNorms:
        """Clip and step. `rates` and `takes_part` (M,); `used` (M, P) for members that lack some of the tensors."""
        gradient = self.weights.gradient()
        if used is not None:
            gradient = gradient.where(used, 0.0)
        norms = gradient.square().sum(1).sqrt()
        clipped = gradient * (self.config.clip_norm / (norms + CLIP_EPS)).clamp(max=1.0)[:, None]
        steps = takes_part & norms.isfinite()
        self.steps += steps
        mask = steps[:, None] if used is None else steps[:, None] & used
        change = self._change(clipped, rates[:, None], mask)
        before = self.weights.matrix.square().sum(1).sqrt()
        self.weights.matrix += change
        return StepNorms(norms, change.square().sum(1).sqrt() / before)

    def _change(self, gradient: Tensor, rate: Tensor, mask: Tensor) -> Tensor:
        """What is added to the weights, 0 where they stay; moves the state."""
        matrix, decay = self.weights.matrix, self.config.weight_decay
        if self.config.kind == "sgd":
            momentum = self.state["momentum"]
            moved = self.config.momentum * momentum + gradient + decay * matrix
            momentum.copy_(moved.where(mask, momentum))
            return (-rate * moved).where(mask, 0.0)
        mean, square = self.state["mean"], self.state["square"]
        new_mean = mean + (1 - ADAM_BETAS[0]) * (gradient - mean)
        new_square = ADAM_BETAS[1] * square + (1 - ADAM_BETAS[1]) * gradient.square()
        # A member that never stepped divides by zero here; the mask leaves it out.
        correction1, correction2 = (1 - beta ** self.steps[:, None] for beta in ADAM_BETAS)
        denominator = new_square.sqrt() / correction2.sqrt() + ADAM_EPS
        mean.copy_(new_mean.where(mask, mean))
        square.copy_(new_square.where(mask, square))
        return (-rate * decay * matrix - rate / correction1 * new_mean / denominator).where(mask, 0.0)

    def clear(self, member: int | slice) -> None:
        """Forget what was gathered for one member, or for several."""
        self.steps[member] = 0
        for tensor in self.state.values():
            tensor[member] = 0
