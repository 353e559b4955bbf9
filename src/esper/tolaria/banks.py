"""Banks: all seeds of one blueprint in one slot, over all hosts of a fleet, as stacked weights.

A bank has room for a bucket of members, so that a birth or a death inside it changes contents and no shape. What is not
a member is padding: it computes on some row and is masked out.
"""

from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.blending import BlendGate
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.lifecycle import SeedState
from esper.leyline import ACTIVE_STAGES, BLEND_STYLES, SeedStage, SlotSpec
from esper.tolaria.stacked import StackedOptimizer, per_member
from esper.tolaria.tasks import OptimiserConfig

BUCKETS = (0, 4, 8, 16, 32, 48, 64)
BUCKET_STEP = 32
"""Beyond the table, capacities are multiples of this."""


def bucket(count: int) -> int:
    """The smallest capacity that holds `count`."""
    for capacity in BUCKETS:
        if count <= capacity:
            return capacity
    return -(-count // BUCKET_STEP) * BUCKET_STEP


class Graft(nn.Module):
    """A seed with its gate, as the rows of a fleet see it."""

    def __init__(self, seed: nn.Module, gate: BlendGate) -> None:
        super().__init__()
        self.seed = seed
        self.gate = gate

    def forward(self, h: Tensor, strength: Tensor, style: Tensor, styles: Set[str]) -> Tensor:
        """What is added to h (E, B, …) by members of these strengths and styles (E,); `styles` are all that occur."""
        delta: Tensor = self.seed(h)
        effect = delta
        if "multiply" in styles:
            effect = torch.where(per_member(style == BLEND_STYLES.index("multiply"), h), h * torch.tanh(delta), effect)
        if "gate" in styles:
            effect = torch.where(per_member(style == BLEND_STYLES.index("gate"), h), self.gate(h) * delta, effect)
        return per_member(strength, h).to(effect.dtype) * effect


class Bank:
    """Stacked seeds. All lists and tensors are by member."""

    def __init__(
        self, slot: SlotSpec, blueprint: str, config: OptimiserConfig, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.slot, self.blueprint, self.config = slot, blueprint, config
        self.device, self.dtype = device, dtype
        with torch.random.fork_rng(devices=[]):
            seed = BlueprintRegistry.build(slot.topology, blueprint, slot.width, resolution=slot.resolution)
            self.graft = Graft(seed, BlendGate(slot.width, slot.topology)).to(device=device, dtype=dtype)
        self.owners: list[int | None] = []
        """The env whose seed it is, or None for padding."""
        self.styles: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self.optimizer: StackedOptimizer | None = None
        self.settle({}, torch.zeros(0))

    @property
    def capacity(self) -> int:
        """Members and padding."""
        return len(self.owners)

    def settle(self, states: Mapping[int, SeedState], conductance: Tensor) -> None:
        """Set the tensors that follow from the owners' states; `conductance` (envs,) is the slot's in each env."""
        owned = [None if owner is None else states[owner] for owner in self.owners]

        def tensor(values: Iterable[float | bool | int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=self.device)

        self.env = tensor((owner or 0 for owner in self.owners), torch.int64)
        self.style = tensor((BLEND_STYLES.index(style) for style in self.styles), torch.int64)
        self.acts = tensor((state is not None and state.stage in ACTIVE_STAGES for state in owned), torch.bool)
        training = [state is not None and state.stage is SeedStage.TRAINING for state in owned]
        self.takes_part = self.acts | tensor(training, torch.bool)
        self.newborn = tensor(
            (
                trains and state is not None and not state.steps_in_stage
                for trains, state in zip(training, owned, strict=True)
            ),
            torch.bool,
        )
        alphas = tensor((0.0 if state is None else state.alpha for state in owned), self.dtype)
        self.full = conductance.to(alphas)[self.env] if self.owners else alphas
        """Strength at alpha 1."""
        self.strength = alphas * self.full
        gated = tensor((style == "gate" for style in self.styles), torch.bool)
        self.used = {name: gated for name in self.weights if name.startswith("gate.")}
        """Which members have the tensors of a gate."""

    def plant(self, env: int, style: str, rng_seed: int) -> int:
        """A new member with fresh weights, the same as a single model's seed of that number would have."""
        slot = self.slot
        seed = BlueprintRegistry.build(
            slot.topology, self.blueprint, slot.width, resolution=slot.resolution, rng_seed=rng_seed
        )
        with torch.random.fork_rng(devices=[]):
            gate = BlendGate(slot.width, slot.topology)
        return self.adopt(env, style, dict(Graft(seed, gate).named_parameters()))

    @torch.no_grad()
    def adopt(self, env: int, style: str, weights: Mapping[str, Tensor]) -> int:
        """A member with these weights; its optimiser state starts anew."""
        member = self._free_member()
        for name, value in weights.items():
            self.weights[name][member] = value.to(device=self.device, dtype=self.dtype)
        self._optimizer().clear(member)
        self.owners[member], self.styles[member] = env, style
        return member

    @torch.no_grad()
    def free(self, member: int) -> None:
        """A seed is gone. Its weights become zero: padding must compute finite numbers."""
        self.owners[member], self.styles[member] = None, "add"
        for tensor in self.weights.values():
            tensor[member] = 0
        self._optimizer().clear(member)

    def effect(self, h: Tensor, members: Tensor, strength: Tensor, valid: Tensor, *, detached: bool) -> Tensor:
        """What these members add to h (E, B, …); exactly 0 where not valid."""
        weights = {
            name: (tensor.detach() if detached else tensor).index_select(0, members)
            for name, tensor in self.weights.items()
        }
        inputs = h, strength, self.style.index_select(0, members), frozenset(self.styles)
        effect: Tensor = functional_call(self.graft, weights, inputs)
        return torch.where(per_member(valid, effect), effect, torch.zeros_like(effect))

    def step(self, rates: Tensor, warm: float) -> Tensor:
        """Clip and step all members that train, at their env's rate (envs,); newborns at a share of it.

        Returns the gradient norms (M,), 0 for those that do not train.
        """
        own = rates.index_select(0, self.env)
        norms = self._optimizer().step(own.where(~self.newborn, own * warm), self.takes_part, self.used).gradient
        return norms.where(self.takes_part, 0.0)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._optimizer().zero_grad()

    def _optimizer(self) -> StackedOptimizer:
        assert self.optimizer is not None, "an empty bank has no optimiser"
        return self.optimizer

    def _free_member(self) -> int:
        if None not in self.owners:
            self._grow(bucket(self.capacity + 1))
        return self.owners.index(None)

    def _grow(self, capacity: int) -> None:
        """The next bucket: weights and optimiser state move, padding is zero."""
        old, before = self.optimizer, self.capacity
        weights = {}
        for name, parameter in self.graft.named_parameters():
            room = torch.zeros(capacity, *parameter.shape, device=self.device, dtype=self.dtype)
            if before:
                room[:before] = self.weights[name].detach()
            weights[name] = room.requires_grad_()
        self.weights = weights
        self.owners += [None] * (capacity - before)
        self.styles += ["add"] * (capacity - before)
        self.optimizer = StackedOptimizer(self.config, weights)
        if old is not None:
            self.optimizer.steps[:before] = old.steps
            for kind, tensors in old.state.items():
                for name, tensor in tensors.items():
                    self.optimizer.state[kind][name][:before] = tensor
