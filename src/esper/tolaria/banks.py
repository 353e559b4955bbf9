"""Stacked networks, their optimisers, and banks: all seeds of one blueprint in one slot, over all hosts of a fleet.

Every tensor has a leading member axis. All tensors of a network lie side by side in one matrix (members, parameters),
so an optimiser step is a dozen kernels whatever the network, and one for SGD on CUDA. It equals `torch.optim.SGD` and
`AdamW` per member, with its own clipping, rate and step count. A member without part in it, or without a finite
gradient, stays as it is.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Size, Tensor, nn

from esper.kasmina.blending import BlendGate
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import RowCall
from esper.kasmina.lifecycle import SeedState
from esper.kasmina.optimiser import CLIP_EPS
from esper.kasmina.row_layout import has_kernels
from esper.kasmina.stages import describe, fits
from esper.leyline import ACTIVE_STAGES, BLEND_STYLES, SeedStage, SlotSpec
from esper.tolaria.tasks import OptimiserConfig

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
BUCKETS = (0, 4, 8, 12, 16, 24, 32, 48, 64)
BUCKET_STEP = 32  # beyond the table, sizes are multiples of this


def bucket(count: int) -> int:
    """The smallest group size that holds `count` members. There are few sizes, so that shapes recur."""
    beyond = -(-count // BUCKET_STEP) * BUCKET_STEP
    return next((size for size in BUCKETS if count <= size), beyond)


LANES = 32  # numbers that a vector loop of torch takes at once; it computes the rest one by one, and rounds differently


def with_spare(count: int, inputs: int) -> int:
    """The size of a group on the CPU, where shapes need not recur: spare entries behind the members, if needed.

    They hold what a vector loop leaves over, even if there is one number per entry and input. A member is never alone,
    because sums over one entry have another order. So its last bits do not depend on the size of its group."""
    if not count:
        return 0
    return count + -(-LANES // inputs) if inputs % LANES else max(count, 2)


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
        """(M, P); zeros where the backward pass left none."""
        parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves.values()]
        return torch.cat([part.reshape(len(self), -1) for part in parts], 1)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None


class _TakeMembers(torch.autograd.Function):
    """The parameters of some members, one contiguous tensor per name. The gradient is one sum into the matrix."""

    @staticmethod
    def forward(
        ctx: Any, matrix: Tensor, shapes: tuple[Size, ...], members: Tensor, learns: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(members, learns)
        ctx.like = matrix
        parts = matrix.index_select(0, members).to(dtype).split([shape.numel() for shape in shapes], 1)
        return tuple(part.contiguous().view(-1, *shape) for part, shape in zip(parts, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        members, learns = ctx.saved_tensors
        gradient = torch.cat([part.reshape(len(members), -1) for part in gradients], 1)
        gradient = gradient.to(ctx.like.dtype).where(learns[:, None], 0.0)
        return torch.zeros_like(ctx.like).index_add_(0, members, gradient), None, None, None, None


class MemberWeights(StackedWeights):
    """Stacked weights of which a pass uses some members. Gradients gather in `whole`, not in the leaves."""

    @cached_property
    def whole(self) -> Tensor:
        """The matrix as a leaf."""
        return self.matrix.detach().requires_grad_()

    def take(self, members: Tensor, learns: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """By name (E, …). Gradients flow back to members that learn: `learns` (E,)."""
        parts = _TakeMembers.apply(self.whole, tuple(self.shapes.values()), members, learns, dtype)  # type: ignore[no-untyped-call]  # torch does not say
        return dict(zip(self.shapes, parts, strict=True))

    def gradient(self) -> Tensor:
        return torch.zeros_like(self.matrix) if self.whole.grad is None else self.whole.grad

    def zero_grad(self) -> None:
        self.whole.grad = None


class StackedOptimizer:
    """The optimiser state of stacked weights."""

    def __init__(self, config: OptimiserConfig, weights: StackedWeights) -> None:
        self.config, self.weights = config, weights
        names = ("momentum",) if config.kind == "sgd" else ("mean", "square")
        self.state = {name: torch.zeros_like(weights.matrix) for name in names}
        self.steps = weights.matrix.new_zeros(len(weights))
        on_cuda = weights.matrix.is_cuda and weights.matrix.dtype == torch.float32
        self._has_kernel = on_cuda and config.kind == "sgd"

    @torch.no_grad()
    def step(
        self,
        rates: Tensor,
        takes_part: Tensor,
        used: Tensor | None = None,
        members: Tensor | None = None,
        newborn: Tensor | None = None,
        warm: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Clip and step. `rates` and `takes_part` (M,); `used` (M, P) for members that lack some of the tensors.
        `members`: the numbers of all that take part, so that the others cost nothing. `newborn` (M,) members have the
        share `warm` of their rate.
        Returns per member the gradient's norm before clipping, 0 if it takes no part, and the update's norm relative to
        that of weights; of `members` alone, if they are given."""
        if self._has_kernel:
            return self._step_at_once(rates, takes_part, used, newborn, warm)
        if newborn is not None and warm is not None:
            rates = rates.where(~newborn, rates * warm)
        gradient, matrix, takes_part, rates, used = (
            _of(members, values) for values in (self.weights.gradient(), self.weights.matrix, takes_part, rates, used)
        )
        if used is not None:
            gradient = gradient.where(used, 0.0)
        norms = gradient.square().sum(1).sqrt()
        clipped = gradient * (self.config.clip_norm / (norms + CLIP_EPS)).clamp(max=1.0)[:, None]
        steps = takes_part & norms.isfinite()
        _add(self.steps, members, steps)
        mask = steps[:, None] if used is None else steps[:, None] & used
        state = {name: _of(members, tensor) for name, tensor in self.state.items()}
        moved, update = self._update(clipped, matrix, state, _of(members, self.steps)[:, None], rates[:, None])
        for name, tensor in moved.items():
            kept = tensor.where(mask, state[name])
            if members is None:
                self.state[name].copy_(kept)
            else:
                self.state[name].index_copy_(0, members, kept)
        update = update.where(mask, 0.0)
        before = matrix.square().sum(1).sqrt()
        _add(self.weights.matrix, members, update)
        return norms.where(takes_part, 0.0), update.square().sum(1).sqrt() / before

    def _step_at_once(
        self, rates: Tensor, takes_part: Tensor, used: Tensor | None, newborn: Tensor | None, warm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from esper.kasmina.kernels.optimiser import Sgd, sgd_step  # needs triton, which only CUDA builds bring along

        settings = Sgd(self.config.clip_norm, CLIP_EPS, self.config.momentum, self.config.weight_decay)
        gradient = self.weights.gradient().contiguous()
        state = (self.weights.matrix, self.state["momentum"], self.steps)
        return sgd_step(settings, gradient, *state, rates, takes_part, used, newborn, warm)

    def _update(
        self, gradient: Tensor, matrix: Tensor, state: Mapping[str, Tensor], steps: Tensor, rate: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The next state, and what is added to the weights, if every member takes part."""
        decay = self.config.weight_decay
        if self.config.kind == "sgd":
            momentum = self.config.momentum * state["momentum"] + gradient + decay * matrix
            return {"momentum": momentum}, -rate * momentum
        mean = state["mean"] + (1 - ADAM_BETAS[0]) * (gradient - state["mean"])
        square = ADAM_BETAS[1] * state["square"] + (1 - ADAM_BETAS[1]) * gradient.square()
        # A member that never stepped divides by zero here; the mask leaves it out.
        correction1, correction2 = (1 - beta**steps for beta in ADAM_BETAS)
        denominator = square.sqrt() / correction2.sqrt() + ADAM_EPS
        return {"mean": mean, "square": square}, -rate * decay * matrix - rate / correction1 * mean / denominator

    def clear(self, member: int | slice) -> None:
        """Reset the state of one member, or of several."""
        self.steps[member] = 0
        for tensor in self.state.values():
            tensor[member] = 0


def _of(members: Tensor | None, values: Any) -> Any:  # Any: a tensor, or None
    """The rows of some members; all of them, without a copy, if none are named."""
    return values if members is None or values is None else values.index_select(0, members)


def _add(values: Tensor, members: Tensor | None, more: Tensor) -> None:
    """Add to the rows of some members, or of all."""
    if members is None:
        values += more
    else:
        values.index_add_(0, members, more.to(values.dtype))


class Bank:
    """Stacked seeds of one blueprint in one slot: a member per env, whether it has such a seed or not.

    Members without a seed have zero weights: they are padding, and must compute finite numbers. With a member per env
    nothing ever moves in memory; an edit changes which members a pass uses (`Act`).
    """

    def __init__(
        self, slot: SlotSpec, blueprint: str, n: int, config: OptimiserConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.slot, self.blueprint, self.dtype, self.device = slot, blueprint, dtype, device
        graft = self._fresh(None).to(device=device, dtype=dtype)
        self._parts = {part: RowCall(module) for part, module in graft.items()}
        shapes = {name: parameter.shape for name, parameter in graft.named_parameters()}
        self.weights = MemberWeights(n, shapes, device, dtype)
        self.program = describe(graft["seed"], self.weights.columns)  # for kernels that run whole stages
        self.optimizer = StackedOptimizer(config, self.weights)
        self.styles: frozenset[str] = frozenset()
        self.style = torch.zeros(n, dtype=torch.int64, device=device)
        self.takes_part, self.newborn = torch.zeros(2, n, dtype=torch.bool, device=device)
        self.strength, self.full = torch.zeros(2, n, dtype=dtype, device=device)  # at the present alpha, at alpha 1
        # Which parameters each member has: those of a gate only where the style has one.
        self.used = torch.zeros_like(self.weights.matrix, dtype=torch.bool)
        self.members: Tensor | None = None  # numbers of those that take part; on CUDA shapes must not depend on them
        self._settled: list[SeedState | None] | None = None

    def plant(self, env: int, rng_seed: int) -> None:
        """Plant a seed with fresh weights, the same as a single model's seed of that number."""
        self.weights.write(env, dict(self._fresh(rng_seed).named_parameters()))
        self.optimizer.clear(env)

    def free(self, env: int | slice) -> None:
        """Remove the seed of an env, or of several."""
        self.weights.matrix[env] = 0
        self.optimizer.clear(env)
        self._settled = None

    def settle(self, slots: Sequence[SeedState], conductance: Tensor) -> None:
        """Set the tensors that follow from the states of its slot by env, and from `conductance` (envs,): how much of
        the slot's effect each host lets through."""
        states = [state if state.blueprint == self.blueprint else None for state in slots]
        states += [None] * (len(self.weights) - len(slots))
        # States are immutable, so the same objects mean the same tensors: an edit settles the banks of one slot only.
        if self._settled is not None and all(new is old for new, old in zip(states, self._settled, strict=True)):
            return
        self._settled = states
        styles = ["add" if state is None else state.style for state in states]
        self.styles = frozenset(styles)
        trains = [state is not None and state.stage is SeedStage.TRAINING for state in states]
        acts = [state is not None and state.stage in ACTIVE_STAGES for state in states]
        young = [state is not None and state.steps_in_stage == 0 for state in states]
        self.style.copy_(torch.tensor([BLEND_STYLES.index(style) for style in styles]))
        self.takes_part.copy_(torch.tensor(trains) | torch.tensor(acts))
        self.newborn.copy_(torch.tensor(trains) & torch.tensor(young))
        if self.device.type == "cpu":
            self.members = self.takes_part.nonzero().squeeze(1)
        self.full.copy_(conductance)
        alphas = torch.tensor([0.0 if state is None else state.alpha for state in states], dtype=self.dtype)
        self.strength.copy_(alphas.to(self.device) * self.full)
        self.used.fill_(True)
        gated = torch.tensor([style == "gate" for style in styles], device=self.device)
        for name, columns in self.weights.columns.items():
            if name.startswith("gate."):
                self.used[:, columns] = gated[:, None]

    def runs_whole(self, h: Tensor) -> bool:
        """Whether kernels run whole stages of these seeds on streams like h (R, B, …)."""
        if self.program is None or not has_kernels(h) or "gate" in self.styles:
            return False
        return self.weights.matrix.dtype == torch.float32 and fits(self.program, h.shape[-2] * h.shape[-1])

    def effect(self, h: Tensor, members: Tensor, strength: Tensor, valid: Tensor, learns: Tensor) -> Tensor:
        """What these members add to h (E, B, …); exactly 0 where not valid. Members that learn get gradients."""
        weights = self.weights.take(members, learns, h.dtype)
        delta = self._call("seed", weights, h)
        gate = self._call("gate", weights, h) if "gate" in self.styles else None
        style, multiplies = self.style.index_select(0, members), "multiply" in self.styles
        if has_kernels(h):
            from esper.kasmina.kernels.blending import blend_images  # needs triton, which only CUDA builds bring along

            return blend_images(h, delta, gate, style, strength, valid, multiplies=multiplies)
        effect = delta
        if multiplies:
            effect = torch.where(per_member(style == BLEND_STYLES.index("multiply"), h), h * torch.tanh(delta), effect)
        if gate is not None:
            effect = torch.where(per_member(style == BLEND_STYLES.index("gate"), h), gate * delta, effect)
        return per_member(strength, h).to(effect.dtype) * effect  # padding has strength 0

    def _call(self, part: str, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
        own = {name.removeprefix(f"{part}."): w for name, w in weights.items() if name.startswith(f"{part}.")}
        result: Tensor = self._parts[part](own, h)
        return result

    def step(self, rates: Tensor, warm: Tensor) -> Tensor:
        """Step all seeds that train, at these rates (envs,), newborns at the share `warm` of it. Returns their gradient
        norms (envs,), 0 for others."""
        norms, _ = self.optimizer.step(rates, self.takes_part, self.used, self.members, self.newborn, warm)
        return norms if self.members is None else torch.zeros_like(rates).index_copy_(0, self.members, norms)

    def _fresh(self, rng_seed: int | None) -> nn.ModuleDict:
        slot = self.slot
        with torch.random.fork_rng(devices=[]):
            seed = BlueprintRegistry.build(
                slot.topology, self.blueprint, slot.width, resolution=slot.resolution, rng_seed=rng_seed
            )
            return nn.ModuleDict({"seed": seed, "gate": BlendGate(slot.width, slot.topology)})
