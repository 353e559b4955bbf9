"""Slots, and the rows that run through a host with slots.

A row is one forward evaluation: the role of each seed, whether it trains, whose statistics it uses. Only the main row
writes anything.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from esper.kasmina import lifecycle
from esper.kasmina.blending import BlendGate, blend, straight_through
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.hosts import Host, refuse_state
from esper.kasmina.layers import Statistics, count_parameters, named_statistics, write_statistics
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
from esper.leyline.numbers import require_known

Isolation = Literal["shadow", "straight_through"]
ISOLATIONS: tuple[Isolation, ...] = get_args(Isolation)

TOPOLOGY_OF_AXES: dict[int, Topology] = {4: "image", 3: "tokens", 2: "vector"}
WIDTH_AXIS: dict[Topology, int] = {"image": 1, "tokens": -1, "vector": -1}


class Role(Enum):
    """What a seed does in the current row."""

    MAIN = "main"  # acts as its stage and alpha say
    SILENT = "silent"  # does nothing
    SHADOW = "shadow"  # acts with full effect on a detached stream


Roles = Mapping[str, Role]


class SeedSlot(nn.Module):
    """Holds at most one seed. The seed's stage decides what it does to the stream."""

    alpha: Tensor

    def __init__(self, spec: SlotSpec | str, isolation: Isolation = "shadow") -> None:
        """`spec` is an id alone if only a first forward pass can tell what passes there."""
        super().__init__()
        self.known_spec = None if isinstance(spec, str) else spec
        self.isolation = isolation
        self.state = SeedState(spec if isinstance(spec, str) else spec.slot_id)
        self.seed: nn.Module | None = None
        self.gate: BlendGate | None = None
        self.role = Role.MAIN
        self._base: tuple[nn.Module, ...] = ()  # in a tuple, so that it is not registered as a child
        # Stages with the same effect on the main row share a value, and so a compiled graph.
        self._effect: Literal["silent", "straight_through", "blend"] = "silent"
        # A buffer, so that a new alpha needs no recompilation.
        self.register_buffer("alpha", torch.zeros(()))

    @property
    def spec(self) -> SlotSpec:
        """What passes here; an error before it is known."""
        if self.known_spec is None:
            remedy = "run one forward pass, or pass example= to attach()"
            raise GateRefusedError(f"what passes slot {self.state.slot_id!r} is not known yet: {remedy}")
        return self.known_spec

    def forward(self, h: Tensor, conductance: Tensor | float = 1.0, source: Tensor | None = None) -> Tensor:
        """The stream behind the slot. The host lets through the share `conductance` of the seed's effect.

        `source` is the input of the submodule in front, which some seeds read instead of h.
        """
        effect = self._effect if self.role is Role.MAIN else self.role.value
        if effect == "silent" or self.seed is None:
            return h
        spec = self.spec
        if TOPOLOGY_OF_AXES.get(h.dim()) != spec.topology or h.shape[WIDTH_AXIS[spec.topology]] != spec.width:
            expected = f"{spec.topology} of width {spec.width}"
            raise HostMismatchError(f"slot {spec.slot_id!r} expects {expected}, not a tensor of shape {tuple(h.shape)}")
        x = self._read(h, source)
        if effect == "blend":
            # Under autocast the seed's scale is wider than the stream, which keeps its dtype.
            return blend(h, self.seed(x), self.alpha * conductance, self.state.style, self.gate).to(h.dtype)
        full = blend(h.detach(), self.seed(x.detach()), conductance, self.state.style, self.gate).to(h.dtype)
        return full if effect == "shadow" else straight_through(h, full)

    def _read(self, h: Tensor, source: Tensor | None) -> Tensor:
        """What the seed reads: the stream, or the input of the submodule in front."""
        if not getattr(self.seed, "reads_input", False):
            return h
        if not isinstance(source, Tensor):
            raise HostMismatchError(
                f"the {self.state.blueprint} seed behind {self.state.slot_id!r} reads that submodule's input: pass it "
                "as the first positional argument"
            )
        return source

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor] | None:
        """Values for the parameters of the submodule in front with the seed folded in; None if it cannot be folded."""
        state, base = self.state, self.base
        if state.blueprint is None or base is None or self.seed is None or state.style != "add":
            return None
        folding = BlueprintRegistry.spec(self.spec.topology, state.blueprint).folding
        return None if folding is None else folding.fold(base, self.seed, state.alpha)

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The forward hook of the submodule in front of this slot."""
        passed: Tensor = self(output, source=args[0] if args else None)
        return passed

    def put_behind(self, base: nn.Module) -> RemovableHandle:
        """Let the slot act behind a submodule."""
        self._base = (base,)
        return base.register_forward_hook(self.hook)

    @property
    def base(self) -> nn.Module | None:
        """The submodule in front, if the slot hooks one."""
        return self._base[0] if self._base else None

    def plant(self, state: SeedState, rng_seed: int, like: Tensor) -> None:
        """Build the seed and gate of `state`, with the device and dtype of `like`."""
        assert state.blueprint is not None
        # Layers draw as they are built; the host's random stream must not notice.
        with torch.random.fork_rng(devices=[]):
            self.seed = BlueprintRegistry.build(
                self.spec.topology,
                state.blueprint,
                self.spec.width,
                resolution=self.spec.resolution,
                rng_seed=rng_seed,
                base=self.base,
            )
            self.gate = BlendGate(self.spec.width, self.spec.topology) if state.style == "gate" else None
        self.to(device=like.device, dtype=like.dtype)
        self.settle(state)

    def settle(self, state: SeedState) -> None:
        """Adopt a new state: set alpha, and free a seed that is no longer alive."""
        self.state = state
        self.alpha.fill_(state.alpha)
        trains = state.stage is SeedStage.TRAINING and self.isolation == "straight_through"
        self._effect = "blend" if state.stage in ACTIVE_STAGES else "straight_through" if trains else "silent"
        if state.stage not in LIVE_STAGES:
            self.seed, self.gate = None, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SeedSlot":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not type it
        self.alpha.fill_(self.state.alpha)  # a wider dtype would keep the rounded digits of the old one
        return self

    @property
    def parameter_count(self) -> int:
        """Parameters of the seed and its gate."""
        return count_parameters(self)

    def report(self) -> SeedReport:
        """What a controller may know about this slot."""
        return lifecycle.report(self.state, self.parameter_count)

    def extra_repr(self) -> str:
        spec = self.known_spec
        stream = "not probed" if spec is None else f"{spec.topology} of width {spec.width}"
        return f"{self.state.slot_id}, {stream}, {self.state.stage.name}"


class Body(nn.Module):
    """A host with slots. Subclasses say how a row runs."""

    def __init__(self, host: nn.Module, slots: Mapping[str, SeedSlot]) -> None:
        super().__init__()
        self.host = host
        # Slot ids may contain dots, module names may not.
        self.slots = nn.ModuleDict({slot_id.replace(".", "/"): slot for slot_id, slot in slots.items()})

    def slot_items(self) -> Iterator[tuple[str, SeedSlot]]:
        """Slot ids with their slots, in the host's order."""
        for key, slot in self.slots.items():
            assert isinstance(slot, SeedSlot)
            yield key.replace("/", "."), slot

    def slot(self, slot_id: str) -> SeedSlot:
        """The slot with that id."""
        slots = dict(self.slot_items())
        require_known("slot", slot_id, slots)
        return slots[slot_id]

    def like(self, slot_id: str) -> Tensor:
        """A tensor with the dtype and device for a seed in that slot."""
        return next(self.host.parameters(), torch.empty(()))

    @contextmanager
    def playing(self, roles: Roles) -> Iterator[None]:
        """Give seeds these roles for one row."""
        slots = {slot_id: self.slot(slot_id) for slot_id in roles}
        for slot_id, slot in slots.items():
            slot.role = roles[slot_id]
        try:
            yield
        finally:
            for slot in slots.values():
                slot.role = Role.MAIN

    def weights_for(self, slot_id: str) -> dict[str, Tensor]:
        """All weights, detached except for those of the seed and gate in one slot."""
        own = {id(parameter) for parameter in self.slot(slot_id).parameters()}
        return {
            name: parameter if id(parameter) in own else parameter.detach()
            for name, parameter in self.named_parameters()
        }

    @abstractmethod
    def main(self, x: Tensor, train: bool, tapped: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the main row. Returns its output, and for each `tapped` slot the tensor that its shadow starts from."""

    @abstractmethod
    def call(self, train: bool, /, *args: Any, **kwargs: Any) -> Tensor:  # Any: arguments of the host
        """Run the main row as a plain call, with whatever the host's forward takes."""

    @abstractmethod
    def shadow(self, slot_id: str, tap: Tensor, train: bool) -> Tensor:
        """Run the shadow row of a seed: full effect, gradient for this seed alone."""

    @abstractmethod
    def calibrate(self, x: Tensor, roles: Roles) -> Statistics:
        """Normalisation statistics of a row, from one train-mode forward pass."""

    @abstractmethod
    def evaluate(self, x: Tensor, roles: Roles, statistics: Statistics | None) -> Tensor:
        """Run a row in eval mode, with its own statistics or, with None, the running ones."""


class SegmentedBody(Body):
    """A host made of segments: a row can start at any slot."""

    host: Host

    def __init__(self, host: Host, slots: Mapping[str, SeedSlot]) -> None:
        refuse_state(host)
        super().__init__(host, slots)
        self._slot_after = {host.slot_index(slot_id): slot_id for slot_id in slots}

    def forward(
        self, h: Tensor, train: bool, born_at: str | None = None, tapped: Collection[str] = ()
    ) -> tuple[Tensor, Statistics, dict[str, Tensor]]:
        """Run a row from the input, or from the stream in front of slot `born_at`.

        Returns its output, its batch statistics, and the detached streams in front of the `tapped` slots.
        """
        statistics: Statistics = {}
        taps: dict[str, Tensor] = {}
        first = 0
        if born_at is not None:
            first = self.host.slot_index(born_at) + 1
            h = self._pass_slot(first - 1, h)
        for index in range(first, len(self.host.segments)):
            h, batch = self.host.run_segment(index, h, train)
            statistics |= named_statistics(f"host.segments.{index}", batch)
            if self._slot_after.get(index) in tapped:
                taps[self._slot_after[index]] = h.detach()
            h = self._pass_slot(index, h)
        return h, statistics, taps

    def _pass_slot(self, index: int, h: Tensor) -> Tensor:
        if index in self._slot_after:
            h = self.slots[self._slot_after[index]](h, self.host.conductance[index])
        return h

    def main(self, x: Tensor, train: bool, tapped: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        output, statistics, taps = self(x, train, tapped=tapped)
        write_statistics(self, statistics)
        return output, taps

    def call(self, train: bool, /, x: Tensor) -> Tensor:
        return self.main(x, train)[0]

    def shadow(self, slot_id: str, tap: Tensor, train: bool) -> Tensor:
        with self.playing({slot_id: Role.SHADOW}):
            output: Tensor = functional_call(self, self.weights_for(slot_id), (tap, train), {"born_at": slot_id})[0]
        return output

    def calibrate(self, x: Tensor, roles: Roles) -> Statistics:
        with self.playing(roles):
            statistics: Statistics = self(x, True)[1]
        return statistics

    def evaluate(self, x: Tensor, roles: Roles, statistics: Statistics | None) -> Tensor:
        with self.playing(roles):
            output: Tensor = functional_call(self, statistics or {}, (x, False))[0]
        return output


# -- random streams ---------------------------------------------------------------------------------------------------


class RandomState(NamedTuple):
    """States of the random streams that a module can draw from: the CPU's and those of its CUDA devices."""

    cpu: Tensor
    cuda: dict[int, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "RandomState":
        """The present states."""
        return cls(torch.get_rng_state(), {index: torch.cuda.get_rng_state(index) for index in _cuda_devices(module)})

    def restore(self) -> None:
        """Set the streams back to these states."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)

    def equals(self, other: "RandomState") -> bool:
        """Whether nothing was drawn between the two."""
        pairs = [(self.cpu, other.cpu), *((state, other.cuda[index]) for index, state in self.cuda.items())]
        return all(torch.equal(left, right) for left, right in pairs)


def _cuda_devices(module: nn.Module) -> list[int]:
    return sorted({parameter.device.index for parameter in module.parameters() if parameter.device.type == "cuda"})


def fork_rng(module: nn.Module) -> AbstractContextManager[None]:
    """Undo all random draws of `module` on exit."""
    return torch.random.fork_rng(_cuda_devices(module))
