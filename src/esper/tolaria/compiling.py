"""Compiles the CUDA kernels of a fleet's seeds before they grow."""

from typing import TYPE_CHECKING

import torch

from esper.kasmina.stages import fits
from esper.tolaria.banks import Bank

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet


def compile_kernels(fleet: "HostFleet") -> None:
    """Compile the kernels of all seeds that may grow, on all cores at once. Otherwise each is compiled when it is first
    needed, while all others wait. On the CPU there is nothing to compile."""
    if fleet.device.type != "cuda" or fleet.dtype != torch.float32:
        return
    from esper.kasmina.kernels.ahead import Kind, compile_seeds  # only CUDA builds include triton

    kinds = []
    for slot in fleet.slots.values():
        for offer in slot.blueprints if slot.resolution is not None else ():
            bank = Bank(slot, offer.name, 1, fleet.task.optimiser, fleet.device, fleet.dtype)
            if bank.program is not None and fits(bank.program, (slot.resolution or 0) ** 2):
                kinds.append(Kind(bank.program, bank.weights.matrix, slot.width, slot.resolution or 0))
    compile_seeds(kinds, fleet.compute)
