"""Snapshots: the last healthy state of every env, in host memory, written over at each step so that it never grows."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina import SeedState
from esper.leyline import UnknownNameError

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet


class SnapshotStore:
    """Weights, statistics, structure, stages, schedules and counters of a whole fleet."""

    def __init__(self, fleet: "HostFleet") -> None:
        self.fleet = fleet
        self._tensors: dict[str, Tensor] = {}
        self._states: list[dict[str, SeedState]] = []
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Remember every env as it is. Host sync: once per step, for the copies to arrive."""
        fleet = self.fleet
        pinned = fleet.device.type == "cuda"
        for name, tensor in self._sources().items():
            if name not in self._tensors:  # pinned, so that the copies can overlap
                self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._tensors[name].copy_(tensor, non_blocking=pinned)
        self._states = [dict(states) for states in fleet.states]
        if fleet.device.type == "cuda":
            torch.cuda.current_stream(fleet.device).synchronize()

    @torch.no_grad()
    def restore(self, env: int) -> None:
        """Put one env back: weights, statistics, structure, states. Its optimiser state starts anew."""
        fleet = self.fleet
        if not 0 <= env < fleet.n:
            raise UnknownNameError("env", env, [f"0 to {fleet.n - 1}"])
        before = self._states[env]
        for slot_id in before:
            fleet.uproot(env, slot_id)
        for name, tensor in self._sources().items():
            # A bank that is younger than the snapshot had no seed then.
            tensor[env] = self._tensors[name][env].to(fleet.device, non_blocking=True) if name in self._tensors else 0
        fleet.optimizer.clear(env)
        fleet.adopt(env, before)

    def bytes(self) -> int:
        """Host memory in use."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def _sources(self) -> dict[str, Tensor]:
        """Everything that is remembered, each (envs, …)."""
        banks = {f"bank {slot_id} {name}": bank.weights.matrix for (slot_id, name), bank in self.fleet.banks.items()}
        return {"host": self.fleet.host.weights.matrix, **self.fleet.host.buffers, **banks}
