"""Slots inside a user's model.

They are registered children of the model, so `model.to`, `model.parameters()` and checkpoints see the seeds. What grows
where, and what the grower must remember, travels in the state dict as one tensor of bytes. Loading a state dict builds
the seeds before their weights are loaded.
"""

import copy
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.checkpoint import check_state
from esper.kasmina.lifecycle import SeedState
from esper.kasmina.slot import SeedSlot
from esper.leyline import LIVE_STAGES, CheckpointError, SlotSpec
from esper.leyline.records import Json, decode, encode, refuse_constant
from esper.storage.stored import checkpoint_errors

CHILD = "esper_slots"
"""Name of the child in the user's model"""
WHERE = f"{CHILD}._extra_state"
VERSION = 1


@dataclass(frozen=True)
class SavedSlot:
    """One slot in the state dict."""

    spec: SlotSpec
    like: str  # a parameter of the host with the dtype and device for a seed
    state: SeedState


@dataclass(frozen=True)
class Structure:
    """What the state dict says besides weights."""

    version: int
    slots: tuple[SavedSlot, ...]
    notes: dict[str, Json]


def copy_statistics(host: nn.Module) -> dict[str, Tensor]:
    """Copies of the running statistics of all norms, by name."""
    names = ("running_mean", "running_var")
    return {name: buffer.clone() for name, buffer in host.named_buffers() if name.rpartition(".")[2] in names}


class ModelSlots(nn.Module):
    """All slots of a model, in the order in which the data passes them."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self._host = (host,)  # in a tuple, so that it is not registered as a child
        self.like: dict[str, str] = {}
        self.notes: dict[str, Json] = {}
        """What the grower must remember, as JSON"""
        self.statistics = copy_statistics(host)
        """Running statistics of the norms as the user built them: a checkpoint may bring others before the Grower is"""
        self.fixed: tuple[str, ...] = ()
        """Norms of a frozen host, whose statistics training does not change"""
        self.on_change: Callable[[], None] | None = None
        """Called when a state dict has changed the seeds"""
        self.waiting = False
        """Whether a Grower may still adopt these slots"""
        self.copies = weakref.WeakSet[ModelSlots]()
        """Slots of copies of the model, which a birth or death here does not reach"""

    @property
    def host(self) -> nn.Module:
        """The user's model."""
        return self._host[0]

    def items(self) -> Iterator[tuple[str, SeedSlot]]:
        """Slots by id."""
        for key, slot in self.named_children():
            assert isinstance(slot, SeedSlot)
            yield key.replace("/", "."), slot

    def __getitem__(self, slot_id: str) -> SeedSlot:
        return dict(self.items())[slot_id]

    def live(self) -> dict[str, SeedSlot]:
        """Slots that hold a seed."""
        return {slot_id: slot for slot_id, slot in self.items() if slot.state.stage in LIVE_STAGES}

    def install(self, slots: Sequence[tuple[SlotSpec, str]]) -> None:
        """Put empty slots behind submodules of the host."""
        for spec, like in slots:
            parameter = self.host.get_parameter(like)
            slot = SeedSlot(spec).to(device=parameter.device, dtype=parameter.dtype)
            self.add_module(spec.slot_id.replace(".", "/"), slot)
            self.like[spec.slot_id] = like
            slot.put_behind(self.host.get_submodule(spec.slot_id))

    def fixed_norms(self) -> set[nn.Module]:
        """The norms whose statistics training does not change."""
        return {self.host.get_submodule(name) for name in self.fixed}

    def train(self, mode: bool = True) -> "ModelSlots":
        """Set the mode. The host's `train` calls this last, so norms with fixed statistics stay in eval mode."""
        super().train(mode)
        for norm in self.fixed_norms():
            norm.training = False
        return self

    def forward(self, x: object) -> object:
        """Pass: a user's `nn.Sequential` runs all its children."""
        return x

    def __deepcopy__(self, memo: dict[int, object]) -> "ModelSlots":
        twin = ModelSlots.__new__(ModelSlots)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin.on_change, twin.waiting, twin.copies = None, False, weakref.WeakSet()
        self.copies.add(twin)
        return twin

    def __getstate__(self) -> dict[str, Any]:  # Any: the attributes of a module
        """All attributes except what ties this object to a grower."""
        state = nn.Module.__getstate__(self)
        return {name: value for name, value in state.items() if name not in ("on_change", "copies")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.on_change, self.waiting, self.copies = None, False, weakref.WeakSet()

    def remove(self) -> None:
        """Remove the slots, their hooks and this child from the host."""
        slots = {slot for _, slot in self.items()}
        for module in self.host.modules():
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__self__", None) in slots:
                    del module._forward_hooks[key]
        delattr(self.host, CHILD)

    # -- state dict ---------------------------------------------------------------------------------------------------

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, strict: bool, *found: Any) -> None:
        """A model that has not run yet also takes a state dict from before growth. (Any: as torch calls it.)"""
        fresh = not any(self.items()) and f"{prefix}_extra_state" not in state
        super()._load_from_state_dict(state, prefix, metadata, strict and not fresh, *found)

    def get_extra_state(self) -> Tensor:
        """The structure as bytes."""
        slots = tuple(SavedSlot(slot.spec, self.like[slot_id], slot.state) for slot_id, slot in self.items())
        content = encode(Structure(VERSION, slots, self.notes))
        return torch.frombuffer(bytearray(json.dumps(content, allow_nan=False).encode()), dtype=torch.uint8)

    def set_extra_state(self, content: Tensor) -> None:
        """Become the saved structure. The weights are loaded after it."""
        saved = read_structure(content)
        present, wanted = [slot_id for slot_id, _ in self.items()], [entry.spec.slot_id for entry in saved.slots]
        if present not in ([], wanted):
            raise CheckpointError(
                f"the state dict has slots behind {wanted}, this model behind {present}: "
                "build the Grower with the same slots"
            )
        if not present:
            self.install([(entry.spec, entry.like) for entry in saved.slots])
        for entry in saved.slots:
            slot, state = self[entry.spec.slot_id], entry.state
            same = (slot.state.blueprint, slot.state.germinations) == (state.blueprint, state.germinations)
            if state.stage in LIVE_STAGES and not same:
                slot.plant(state, 0, like=self.host.get_parameter(entry.like))
                slot.train(self.host.training)
            slot.settle(state)
        self.notes = saved.notes
        if self.on_change is not None:
            self.on_change()


def read_structure(state: Tensor) -> Structure:
    """The structure in a tensor of bytes, checked."""
    with checkpoint_errors(WHERE):
        content = json.loads(bytes(state.cpu().numpy().tobytes()).decode(), parse_constant=refuse_constant)
        structure: Structure = decode(Structure, content, WHERE)
    if structure.version != VERSION:
        raise CheckpointError(f"{WHERE} has version {structure.version}; this version of Esper reads {VERSION}")
    for entry in structure.slots:
        check_state(entry.spec, entry.state, f"{WHERE}: slot {entry.spec.slot_id!r}")
    return structure
