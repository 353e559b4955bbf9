"""A slot: the place where one seed lives, and what the stream becomes when it passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from esper.kasmina.blending import BlendGate, blend, make_gate, straight_through
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.lifecycle import SeedState
from esper.leyline import ACTIVE_STAGES, LIVE_STAGES, HostMismatchError, SeedReport, SeedStage, SlotSpec, Topology

Isolation = Literal["shadow", "straight_through"]
ISOLATIONS: tuple[Isolation, ...] = get_args(Isolation)

TOPOLOGY_OF_AXES: dict[int, Topology] = {4: "image", 3: "tokens", 2: "vector"}
WIDTH_AXIS: dict[Topology, int] = {"image": 1, "tokens": -1, "vector": -1}


class Role(Enum):
    """What a seed does in the row that is being run."""

    MAIN = "main"
    """As its stage and alpha say."""
    SILENT = "silent"
    """Nothing."""
    SHADOW = "shadow"
    """Full effect on a detached stream."""


class SeedSlot(nn.Module):
    """Holds at most one seed. The stage decides what the seed does; the slot decides nothing."""

    alpha: Tensor

    def __init__(self, spec: SlotSpec, isolation: Isolation = "shadow") -> None:
        super().__init__()
        self.spec = spec
        self.isolation = isolation
        self.state = SeedState(spec.slot_id)
        self.seed: nn.Module | None = None
        self.gate: BlendGate | None = None
        self.role = Role.MAIN
        # A buffer, so that a new alpha needs neither a recompilation nor a new graph.
        self.register_buffer("alpha", torch.zeros(()))

    def forward(self, h: Tensor, conductance: Tensor | float = 1.0) -> Tensor:
        """The stream behind the slot. `conductance` is how much of the seed's effect the host lets through."""
        if self.seed is None or self.role is Role.SILENT:
            return h
        self._check_width(h)
        if self.role is Role.SHADOW:
            return self._full_effect(h.detach(), self.seed, conductance)
        if self.state.stage in ACTIVE_STAGES:
            return blend(h, self.seed(h), self.alpha * conductance, self.state.style, self.gate)
        if self.state.stage is SeedStage.TRAINING and self.isolation == "straight_through":
            return straight_through(h, self._full_effect(h.detach(), self.seed, conductance))
        return h

    def _full_effect(self, h: Tensor, seed: nn.Module, conductance: Tensor | float) -> Tensor:
        return blend(h, seed(h), conductance, self.state.style, self.gate)

    def _check_width(self, h: Tensor) -> None:
        axis = WIDTH_AXIS[self.spec.topology]
        if TOPOLOGY_OF_AXES.get(h.dim()) != self.spec.topology or h.shape[axis] != self.spec.width:
            raise HostMismatchError(
                f"slot {self.spec.slot_id!r} expects {self.spec.topology} of width {self.spec.width}, "
                f"but a tensor of shape {tuple(h.shape)} passes there"
            )

    @contextmanager
    def playing(self, role: Role) -> Iterator[None]:
        """Play a role for one row."""
        before, self.role = self.role, role
        try:
            yield
        finally:
            self.role = before

    def plant(self, state: SeedState, rng_seed: int, like: Tensor) -> None:
        """Build the seed (and gate) that `state` speaks of, on the device and in the dtype of `like`."""
        if state.blueprint is None:
            raise ValueError(f"state of slot {state.slot_id!r} names no blueprint")
        seed = BlueprintRegistry.build(
            self.spec.topology, state.blueprint, self.spec.width, resolution=self.spec.resolution, rng_seed=rng_seed
        )
        gate = make_gate(state.style, self.spec)
        self.seed = seed.to(device=like.device, dtype=like.dtype)
        self.gate = None if gate is None else gate.to(device=like.device, dtype=like.dtype)
        self.settle(state)

    def settle(self, state: SeedState) -> None:
        """Adopt a new state: alpha follows, and a seed that is no longer alive is freed."""
        self.state = state
        self.alpha.fill_(state.alpha)
        if state.stage not in LIVE_STAGES:
            self.seed, self.gate = None, None

    @property
    def parameter_count(self) -> int:
        """Parameters of the seed and its gate."""
        return sum(parameter.numel() for parameter in self.parameters())

    def report(self) -> SeedReport:
        """What a controller may know of this slot."""
        state = self.state
        return SeedReport(
            slot_id=state.slot_id,
            stage=state.stage,
            blueprint=state.blueprint,
            style=state.style if state.blueprint is not None else None,
            alpha=state.alpha,
            alpha_target=state.controller.target,
            ramping=state.ramping,
            steps_in_stage=state.steps_in_stage,
            age=state.age,
            cooldown=state.cooldown,
            parameters=self.parameter_count,
            gradient_norm=state.gradient_norm,
            audition=state.audition,
            contribution=state.contribution,
            germinations=state.germinations,
        )

    def extra_repr(self) -> str:
        return f"{self.spec.slot_id}, {self.spec.topology} of width {self.spec.width}, {self.state.stage.name}"
