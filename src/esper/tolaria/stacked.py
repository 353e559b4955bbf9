"""Optimisers over stacked networks: every tensor carries a leading member axis, and so does everything about it.

Equal to `torch.optim.SGD` and `AdamW` per member. Clipping, rates, step counts and who takes part are per member too; a
member that does not take part, or whose gradient is not finite, keeps its weights and its state.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.optimiser import CLIP_EPS
from esper.tolaria.tasks import OptimiserConfig

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


def per_member(values: Tensor, like: Tensor) -> Tensor:
    """(M,) reshaped to multiply (M, …)."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


class StepNorms(NamedTuple):
    """Per member: the gradient's norm before clipping, and the update's relative to that of the weights."""

    gradient: Tensor
    update_ratio: Tensor


class StackedOptimizer:
    """The optimiser state of M members with the same tensors."""

    def __init__(self, config: OptimiserConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.tensors = dict(tensors)
        names = ("momentum",) if config.kind == "sgd" else ("mean", "square")
        self.state = {kind: {name: torch.zeros_like(t) for name, t in self.tensors.items()} for kind in names}
        self.steps = next(iter(self.tensors.values())).new_zeros(self.members)

    @property
    def members(self) -> int:
        """Length of the member axis."""
        return len(next(iter(self.tensors.values())))

    @torch.no_grad()
    def step(self, rates: Tensor, takes_part: Tensor, used: Mapping[str, Tensor] | None = None) -> StepNorms:
        """Clip and step.

        `rates` (M,), `takes_part` (M,); `used` (M,) per tensor name, for tensors that only some members have.
        """
        gradients = {name: self._gradient(name, used) for name in self.tensors}
        squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        factors = (self.config.clip_norm / (norms + CLIP_EPS)).clamp(max=1.0)
        steps = takes_part & norms.isfinite()
        self.steps += steps
        moved, total = torch.zeros_like(norms), torch.zeros_like(norms)
        for name, gradient in gradients.items():
            tensor = self.tensors[name]
            chosen = steps if used is None or name not in used else steps & used[name]
            mask = per_member(chosen, tensor)
            clipped = gradient * per_member(factors, tensor)
            change = self._change(name, tensor.detach(), clipped, per_member(rates, tensor), mask)
            total += tensor.detach().flatten(1).square().sum(1)
            moved += change.flatten(1).square().sum(1)
            tensor += change
        return StepNorms(norms, moved.sqrt() / total.sqrt())

    def _gradient(self, name: str, used: Mapping[str, Tensor] | None) -> Tensor:
        tensor = self.tensors[name]
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if used is not None and name in used:
            return gradient.where(per_member(used[name], tensor), 0.0)
        return gradient

    def _change(self, name: str, tensor: Tensor, gradient: Tensor, rate: Tensor, mask: Tensor) -> Tensor:
        """What is added to the weights, 0 for members that keep theirs; moves the state."""
        if self.config.kind == "sgd":
            momentum = self.state["momentum"][name]
            moved = self.config.momentum * momentum + gradient + self.config.weight_decay * tensor
            momentum.copy_(moved.where(mask, momentum))
            return (-rate * moved).where(mask, 0.0)
        mean, square = self.state["mean"][name], self.state["square"][name]
        new_mean = mean + (1 - ADAM_BETAS[0]) * (gradient - mean)
        new_square = ADAM_BETAS[1] * square + (1 - ADAM_BETAS[1]) * gradient.square()
        # A member that never stepped divides by zero here; the mask leaves it out.
        correction1, correction2 = (1 - beta ** per_member(self.steps, tensor) for beta in ADAM_BETAS)
        denominator = new_square.sqrt() / correction2.sqrt() + ADAM_EPS
        mean.copy_(new_mean.where(mask, mean))
        square.copy_(new_square.where(mask, square))
        change = -rate * self.config.weight_decay * tensor - rate / correction1 * new_mean / denominator
        return change.where(mask, 0.0)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for tensor in self.tensors.values():
            tensor.grad = None

    def clear(self, member: int) -> None:
        """Forget what was gathered for one member."""
        self.steps[member] = 0
        for tensors in self.state.values():
            for tensor in tensors.values():
                tensor[member] = 0
