"""A slot: the place where one seed lives, and what the stream becomes when it passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from esper.kasmina import lifecycle
from esper.kasmina.blending import BlendGate, blend, make_gate, straight_through
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.lifecycle import SeedState
from esper.leyline import (
    ACTIVE_STAGES,
    LIVE_STAGES,
    GateRefusedError,
    HostMismatchError,
    SeedReport,
    SeedStage,
    SlotSpec,
    Topology,
)

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

    def __init__(self, spec: SlotSpec | str, isolation: Isolation = "shadow") -> None:
        """`spec`, or the id alone where a first forward pass has yet to show what passes there (see `learn`)."""
        super().__init__()
        self._spec = None if isinstance(spec, str) else spec
        self.isolation = isolation
        self.state = SeedState(spec if isinstance(spec, str) else spec.slot_id)
        self.seed: nn.Module | None = None
        self.gate: BlendGate | None = None
        self.role = Role.MAIN
        # What it does to the main row. Stages that do the same share a value here, and so a compiled graph.
        self._effect: Literal["silent", "straight_through", "blend"] = "silent"
        # A buffer, so that a new alpha needs neither a recompilation nor a new graph.
        self.register_buffer("alpha", torch.zeros(()))

    @property
    def spec(self) -> SlotSpec:
        """What passes here."""
        if self._spec is None:
            raise GateRefusedError(
                f"what passes slot {self.state.slot_id!r} is not known yet: run one forward pass, "
                "or pass example= to attach()"
            )
        return self._spec

    def learn(self, spec: SlotSpec) -> None:
        """A probe has seen what passes here."""
        self._spec = spec

    def forward(self, h: Tensor, conductance: Tensor | float = 1.0) -> Tensor:
        """The stream behind the slot. `conductance` is how much of the seed's effect the host lets through."""
        effect = self._effect if self.role is Role.MAIN else self.role.value
        if effect == "silent" or self.seed is None:
            return h
        self._check_width(h)
        if effect == "blend":
            return blend(h, self.seed(h), self.alpha * conductance, self.state.style, self.gate)
        full = blend(h.detach(), self.seed(h.detach()), conductance, self.state.style, self.gate)
        return full if effect == "shadow" else straight_through(h, full)

    def hook(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """As a forward hook of the submodule that this slot lies behind."""
        passed: Tensor = self(output)
        return passed

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
        # Layers draw as they are built; the host's random stream must not notice.
        with torch.random.fork_rng(devices=[]):
            seed = BlueprintRegistry.build(
                self.spec.topology, state.blueprint, self.spec.width, resolution=self.spec.resolution, rng_seed=rng_seed
            )
            gate = make_gate(state.style, self.spec)
        self.seed, self.gate = seed, gate
        self.to(device=like.device, dtype=like.dtype)
        self.settle(state)

    def settle(self, state: SeedState) -> None:
        """Adopt a new state: alpha follows, and a seed that is no longer alive is freed."""
        self.state = state
        self.alpha.fill_(state.alpha)
        if state.stage in ACTIVE_STAGES:
            self._effect = "blend"
        elif state.stage is SeedStage.TRAINING and self.isolation == "straight_through":
            self._effect = "straight_through"
        else:
            self._effect = "silent"
        if state.stage not in LIVE_STAGES:
            self.seed, self.gate = None, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SeedSlot":
        """As for any module; alpha is then set anew, as a wider dtype would keep the digits of the old one."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not type it
        self.alpha.fill_(self.state.alpha)
        return self

    @property
    def parameter_count(self) -> int:
        """Parameters of the seed and its gate."""
        return sum(parameter.numel() for parameter in self.parameters())

    def report(self) -> SeedReport:
        """What a controller may know of this slot."""
        return lifecycle.report(self.state, self.parameter_count)

    def extra_repr(self) -> str:
        stream = "not probed" if self._spec is None else f"{self._spec.topology} of width {self._spec.width}"
        return f"{self.state.slot_id}, {stream}, {self.state.stage.name}"
