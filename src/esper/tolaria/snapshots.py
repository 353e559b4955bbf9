"""Snapshots: the last healthy state of every env, in host memory, written over at each step so that it never grows."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina import SeedState
from esper.leyline import LIVE_STAGES

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

BankKey = tuple[str, str]


class SnapshotStore:
    """Weights, statistics, structure, stages, schedules and counters of a whole fleet."""

    def __init__(self, fleet: "HostFleet") -> None:
        self.fleet = fleet
        self._tensors: dict[str, Tensor] = {}
        self._banks: dict[BankKey, dict[str, Tensor]] = {}
        self._members: dict[tuple[int, str], int] = {}
        self._states: list[dict[str, SeedState]] = []
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Remember every env as it is. Host sync: once per step, for the copies to arrive."""
        fleet = self.fleet
        self._copy(self._tensors, {**fleet.host.weights, **fleet.host.buffers})
        for key, bank in fleet.banks.items():
            self._copy(self._banks.setdefault(key, {}), bank.weights)
        self._members = dict(fleet.members)
        self._states = [dict(states) for states in fleet.states]
        if fleet.device.type == "cuda":
            torch.cuda.current_stream(fleet.device).synchronize()

    @torch.no_grad()
    def restore(self, env: int) -> None:
        """Put one env back: weights, statistics, structure, states. Its optimiser state starts anew."""
        fleet = self.fleet
        for name, tensor in {**fleet.host.weights, **fleet.host.buffers}.items():
            tensor[env] = self._tensors[name][env].to(fleet.device, non_blocking=True)
        fleet.optimizer.clear(env)
        for slot_id, state in self._states[env].items():
            fleet.uproot(env, slot_id)
            if state.stage in LIVE_STAGES:
                member = self._members[env, slot_id]
                stored = self._banks[slot_id, str(state.blueprint)]
                fleet.transplant(env, slot_id, state, {name: tensor[member] for name, tensor in stored.items()})
            else:
                fleet.states[env][slot_id] = state

    def bytes(self) -> int:
        """Host memory in use."""
        tensors = [*self._tensors.values(), *(t for bank in self._banks.values() for t in bank.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _copy(self, store: dict[str, Tensor], source: dict[str, Tensor]) -> None:
        """Into memory that is there already, unless a bank has outgrown it. Pinned, so that the copies can overlap."""
        pinned = self.fleet.device.type == "cuda"
        for name, tensor in source.items():
            if name not in store or store[name].shape != tensor.shape:
                store[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            store[name].copy_(tensor.detach(), non_blocking=pinned)
