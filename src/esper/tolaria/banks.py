"""Banks: all seeds of one blueprint in one slot, over all hosts of a fleet, as stacked weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esper.kasmina.blending import BlendGate
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import RowCall
from esper.kasmina.lifecycle import SeedState
from esper.kasmina.row_layout import has_kernels
from esper.leyline import ACTIVE_STAGES, BLEND_STYLES, SeedStage, SlotSpec
from esper.tolaria.stacked import MemberWeights, StackedOptimizer, per_member
from esper.tolaria.tasks import OptimiserConfig

BUCKETS = (0, 4, 8, 12, 16, 24, 32, 48, 64)
BUCKET_STEP = 32
"""Beyond the table, sizes are multiples of this."""


def bucket(count: int) -> int:
    """The smallest size that holds `count`: a pass takes members in groups of such sizes, so that shapes recur."""
    for size in BUCKETS:
        if count <= size:
            return size
    return -(-count // BUCKET_STEP) * BUCKET_STEP


class Bank:
    """Stacked seeds of one blueprint in one slot: a member per env, whether its seed is there or not.

    Members that are not there have zero weights: they are padding, and must compute finite numbers. With a member per
    env nothing ever moves in memory; what an edit changes is which members a pass takes (`Act`).
    """

    def __init__(
        self,
        slot: SlotSpec,
        blueprint: str,
        envs: int,
        config: OptimiserConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.slot, self.blueprint, self.dtype, self.device = slot, blueprint, dtype, device
        self.graft = self._fresh(None).to(device=device, dtype=dtype)
        self._parts = {part: RowCall(module) for part, module in self.graft.items()}
        shapes = {name: parameter.shape for name, parameter in self.graft.named_parameters()}
        self.weights = MemberWeights(envs, shapes, device, dtype)
        self.optimizer = StackedOptimizer(config, self.weights)
        self.styles: frozenset[str] = frozenset()
        self.style = torch.zeros(envs, dtype=torch.int64, device=device)
        self.takes_part, self.newborn = torch.zeros(2, envs, dtype=torch.bool, device=device)
        self.strength, self.full = torch.zeros(2, envs, dtype=dtype, device=device)
        """Strengths at the present alpha and at alpha 1."""
        self.used = torch.zeros_like(self.weights.matrix, dtype=torch.bool)
        """Which parameters each member has: those of a gate only where the style has one."""
        self._settled: list[SeedState | None] | None = None

    def plant(self, env: int, rng_seed: int) -> None:
        """A seed with fresh weights, the same as a single model's seed of that number would have."""
        self.weights.write(env, dict(self._fresh(rng_seed).named_parameters()))
        self.optimizer.clear(env)

    def free(self, env: int) -> None:
        """The seed of an env is gone."""
        self.weights.matrix[env] = 0
        self.optimizer.clear(env)

    def clear(self) -> None:
        """No env has a seed here."""
        self._settled = None
        self.weights.matrix.zero_()
        self.optimizer.clear(slice(None))

    def settle(self, seeds: Mapping[int, SeedState], conductance: Tensor) -> None:
        """Set the tensors that follow from the states of its seeds by env, in place.

        `conductance` (envs,) is how much of the slot's effect each host lets through; it is constant in an episode.
        """
        states = [seeds.get(env) for env in range(len(self.weights))]
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
        self.takes_part.copy_(torch.tensor([t or a for t, a in zip(trains, acts, strict=True)]))
        self.newborn.copy_(torch.tensor([t and y for t, y in zip(trains, young, strict=True)]))
        self.full.copy_(conductance)
        alphas = torch.tensor([0.0 if state is None else state.alpha for state in states], dtype=self.dtype)
        self.strength.copy_(alphas.to(self.device) * self.full)
        self.used.fill_(True)
        gated = torch.tensor([style == "gate" for style in styles], device=self.device)
        for name, columns in self.weights.columns.items():
            if name.startswith("gate."):
                self.used[:, columns] = gated[:, None]

    def effect(self, h: Tensor, members: Tensor, strength: Tensor, valid: Tensor, learns: Tensor) -> Tensor:
        """What these members add to h (E, B, …); exactly 0 where not valid. Their weights get gradient where they
        learn."""
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
        effect = per_member(strength, h).to(effect.dtype) * effect
        return torch.where(per_member(valid, effect), effect, 0.0)

    def _call(self, part: str, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
        """Seed or gate of these members on h."""
        own = {name.removeprefix(f"{part}."): w for name, w in weights.items() if name.startswith(f"{part}.")}
        result: Tensor = self._parts[part](own, h)
        return result

    def step(self, rates: Tensor, warm: Tensor) -> Tensor:
        """Clip and step all seeds that train, at their env's rate (envs,); newborns at the share `warm` of it.

        Returns the gradient norms (envs,), 0 for those that do not train.
        """
        rates = rates.where(~self.newborn, rates * warm)
        return self.optimizer.step(rates, self.takes_part, self.used).gradient.where(self.takes_part, 0.0)

    def _fresh(self, rng_seed: int | None) -> nn.ModuleDict:
        """A seed with its gate."""
        slot = self.slot
        with torch.random.fork_rng(devices=[]):
            seed = BlueprintRegistry.build(
                slot.topology, self.blueprint, slot.width, resolution=slot.resolution, rng_seed=rng_seed
            )
            return nn.ModuleDict({"seed": seed, "gate": BlendGate(slot.width, slot.topology)})
