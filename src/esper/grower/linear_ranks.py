"""How much rank each linear layer deserves, from gradients alone: the source of a `rank_pattern` for LoRA.

LoRA adds B·A to a weight W (out × in), with B = 0 and rows of A drawn with variance 1/(3·in). At birth only B has a
gradient, (∂L/∂W)·Aᵀ. The i-th singular direction of ∂L/∂W contributes σᵢ²/(3·in) to its expected square, which is the
rate at which gradient descent on B lowers the loss along it. One rank costs in + out parameters. So the best use of a
budget is greedy: the next rank goes to the layer with the largest σᵢ² / (in · (in + out)).

Noise has singular values too. So the directions come from one half of the minibatches, and their worth from the other:
sᵢ = σᵢ · uᵢᵀ G vᵢ, averaged over both ways. Directions that are noise have an expectation of zero.
"""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole

MOST = 64  # ranks whose worth is measured
EXTRA = 8  # columns of the randomised decomposition beyond these
EXACT = 512  # size up to which the decomposition is exact
DRAWN = 3  # rows of LoRA's A have variance 1 / (3 · in)


class LayerProfile(NamedTuple):
    """What rank would be worth in one layer."""

    name: str
    parameters: int
    """Of one rank"""
    worths: tuple[float, ...]
    """Of the first, second, … rank: expected square of the gradient of B, without noise; never increasing"""
    agreement: float
    """Cosine between the gradients of the two halves of the minibatches: 1 without noise, about 0 if there is only
    noise"""


Call = tuple[Tensor, Tensor]
"""The input of a layer, and the gradient of the loss with respect to its output"""


class LinearTap:
    """Sums the weight gradients of linear and convolutional layers, also of frozen ones, over two sets of minibatches.

    Weights and their `grad` are not touched. It needs the memory of two gradients of all these weights.
    """

    def __init__(self, host: nn.Module, skip: str) -> None:
        """`skip` is the name of a child whose layers do not count."""
        self.layers = {
            name: layer for name, layer in host.named_modules() if has_rank(layer) and not f"{name}.".startswith(skip)
        }
        self.sums: dict[str, list[Tensor | None]] = {name: [None, None] for name in self.layers}
        self.order: list[str] = []
        """Layers in the order in which they first ran"""

    @contextmanager
    def watching(self) -> Iterator[dict[str, list[Call]]]:
        """Collect (input, output) of each layer's calls while the block runs."""
        calls: dict[str, list[Call]] = {}

        def catch(name: str, args: tuple[object, ...], output: object) -> object:
            if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
                return output
            caught = output if output.requires_grad else output.detach().requires_grad_()
            calls.setdefault(name, []).append((args[0].detach(), caught))
            if name not in self.order:
                self.order.append(name)
            return caught.clone()  # what follows may work in place

        handles = [
            layer.register_forward_hook(lambda _, args, output, name=name: catch(name, args, output))
            for name, layer in self.layers.items()
        ]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    @contextmanager
    def none() -> Iterator[dict[str, list[Call]]]:
        """Collect nothing."""
        yield {}

    @property
    def bytes(self) -> int:
        """Memory of the gradients."""
        return sum(
            part.numel() * part.element_size() for pair in self.sums.values() for part in pair if part is not None
        )

    @torch.no_grad()
    def add(self, half: int, calls: Mapping[str, Sequence[Call]]) -> None:
        """Add the weight gradients of one minibatch to the first or second half. `calls` hold output gradients now."""
        for name, own in calls.items():
            for x, g in own:
                gradient = weight_gradient(self.layers[name], x.float(), g.float())
                before = self.sums[name][half]
                self.sums[name][half] = gradient if before is None else before.add_(gradient)

    def profiles(self) -> tuple[LayerProfile, ...]:
        """The layers that ran, in their order, without the last one: it is the head, which is trained as a whole."""
        found = []
        for name in self.order[:-1]:
            first, second = self.sums[name]
            if first is not None and second is not None:
                found.append(profile_of(name, first, second))
        return tuple(found)


def has_rank(layer: nn.Module) -> bool:
    """Whether PEFT's LoRA fits: linear layers, `Conv1D` of transformers, and convolutions without groups."""
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def weight_gradient(layer: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    """∂L/∂W as a matrix (out, in), from the layer's input and the gradient at its output."""
    if isinstance(layer, nn.Conv2d):
        options = layer.stride, layer.padding, layer.dilation, layer.groups
        kernels: Tensor = conv2d_weight(x, layer.weight.shape, g, *options)
        return kernels.flatten(1)
    return g.flatten(0, -2).T @ x.flatten(0, -2)


@torch.no_grad()
def profile_of(name: str, first: Tensor, second: Tensor) -> LayerProfile:
    """The profile of a layer from the summed gradients of two halves."""
    outputs, inputs = first.shape
    ways = [_held_out(*pair) for pair in ((first, second), (second, first))]
    worths = torch.stack(ways).mean(0).cummin(0).values.clamp(min=0) / (DRAWN * inputs)
    product = (first * second).sum() / (first.norm() * second.norm()).clamp(min=torch.finfo(torch.float32).tiny)
    return LayerProfile(name, inputs + outputs, tuple(worths.tolist()), float(product))


def _held_out(own: Tensor, other: Tensor) -> Tensor:
    """σᵢ · uᵢᵀ G vᵢ: singular directions of one gradient, measured in the other."""
    count = min(MOST, *own.shape)
    if max(own.shape) <= EXACT or min(own.shape) <= MOST + EXTRA:
        u, s, vt = torch.linalg.svd(own, full_matrices=False)
        v = vt.T
    else:
        u, s, v = torch.svd_lowrank(own, q=min(MOST + EXTRA, *own.shape))  # draws; the caller restores the stream
    worths: Tensor = s * (u * (other @ v)).sum(0)
    return worths[:count]


def allocate(
    profiles: Sequence[LayerProfile], budget: int, *, max_rank: int = MOST, modules: str | Sequence[str] | None = None
) -> dict[str, int]:
    """Ranks by layer that are worth most together under a budget of parameters; layers without any are omitted."""
    require_whole("budget", budget, 1, remark=": it is the number of parameters of all adapters together")
    require_whole("max_rank", max_rank, 1)
    if max_rank > MOST:
        raise BadValueError(f"max_rank {max_rank} is above {MOST}, the ranks that were measured")
    chosen = [profile for profile in profiles if modules is None or _matches(profile.name, modules)]
    if not chosen:
        names = ", ".join(profile.name for profile in profiles) or "none"
        raise BadValueError(f"no layer that ran is among target_modules {modules!r}; measured were: {names}")
    if budget < (least := min(profile.parameters for profile in chosen)):
        raise BadValueError(f"budget {budget:,} is too small: the cheapest rank has {least:,} parameters")
    ranks: dict[str, int] = {}
    queue = [(-profile.worths[0] / profile.parameters, index) for index, profile in enumerate(chosen)]
    heapq.heapify(queue)
    left = budget
    while queue:
        density, index = heapq.heappop(queue)
        profile = chosen[index]
        if density >= 0 or profile.parameters > left:
            continue
        left -= profile.parameters
        rank = ranks[profile.name] = ranks.get(profile.name, 0) + 1
        if rank < min(max_rank, len(profile.worths)):
            heapq.heappush(queue, (-profile.worths[rank] / profile.parameters, index))
    if not ranks:
        raise BadValueError(
            "no layer earns a rank: the gradients of the two halves of the minibatches do not agree. Call suggest() "
            "with more of them (minibatches=), with larger batches, or after some training"
        )
    # PEFT takes the first key that a module's name ends with, so the longest stands first.
    return dict(sorted(ranks.items(), key=lambda item: -len(item[0])))


def _matches(name: str, modules: str | Sequence[str]) -> bool:
    """As PEFT matches `target_modules`: a regular expression, or endings of names."""
    if isinstance(modules, str):
        return re.fullmatch(modules, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in modules)
