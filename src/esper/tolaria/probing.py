"""What can be sensed at a slot without growing anything there.

One forward and backward pass over a probe minibatch, no weight and no statistic moved: how the activation behind each
slot's place looks, how much the loss depends on it, and for every blueprint how strongly a seed of it would be pulled
in if it were there. A seed's effect is y = h + c·scale·f(h), with c what the host lets through, and it is born with
scale = 0, so the first-order worth of a blueprint in a slot is |∂L/∂scale| = |c · Σ g·f(h)| with g = ∂L/∂h.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import Scale
from esper.leyline import SlotSpec, derive_seed
from esper.tolaria.fleet import HostFleet, row_losses


class Sensing(NamedTuple):
    """What a probe found, per env and slot (N, S)."""

    rms: Tensor
    """Root mean square of the activation."""
    rank: Tensor
    """Share of its channels that vary on their own: (Σλ)²/Σλ² of the channels' covariance, over their number."""
    gradient: Tensor
    """Norm of the loss gradient there, relative to the sum over slots."""
    offers: Tensor
    """(N, S, B): first-order worth of each blueprint, relative to the largest of the env; 0 where it does not fit."""


class Prober:
    """Probes a fleet. It keeps one newborn of every blueprint per slot, with scale 1, for all envs."""

    def __init__(self, fleet: HostFleet) -> None:
        self.fleet = fleet
        self.names = fleet.task.slot_config.blueprint_names
        self._probes = {
            (slot_id, offer.name): self._newborn(slot, offer.name)
            for slot_id, slot in fleet.slots.items()
            for offer in slot.blueprints
        }

    def _newborn(self, slot: SlotSpec, name: str) -> nn.Module:
        rng_seed = derive_seed("probe", slot.slot_id, name)
        module = BlueprintRegistry.build(slot.topology, name, slot.width, resolution=slot.resolution, rng_seed=rng_seed)
        for part in module.modules():
            if isinstance(part, Scale):
                nn.init.ones_(part.weight)
        module.requires_grad_(False)
        return module.to(device=self.fleet.device, dtype=self.fleet.compute)

    def __call__(self) -> Sensing:
        """Probe all envs on the minibatch that they will train on next. Reads nothing back from the device."""
        fleet = self.fleet
        inputs, targets = fleet.draw(fleet.step_index * fleet.task.batches_per_step)
        done = fleet.host.run(fleet.plan.main, inputs, train=True, tapped=fleet.places.values())
        streams = [done.taps[place] for place in fleet.places.values()]
        gradients = torch.autograd.grad(row_losses(done.output, targets).sum(), streams)
        with torch.no_grad():
            found = [self._look(h.detach()) for h in streams]
            worths = [
                self._offers(slot_id, h.detach(), g)
                for slot_id, h, g in zip(fleet.slots, streams, gradients, strict=True)
            ]
            norms = torch.stack([g.flatten(1).float().norm(dim=1) for g in gradients], 1)
            offers = torch.stack(worths, 1)
            n, tiny = fleet.n, torch.finfo(torch.float32).tiny
            return Sensing(
                torch.stack([rms for rms, _ in found], 1)[:n],
                torch.stack([rank for _, rank in found], 1)[:n],
                (norms / norms.sum(1, keepdim=True).clamp(min=tiny))[:n],
                (offers / offers.flatten(1).amax(1).clamp(min=tiny)[:, None, None])[:n],
            )

    def _look(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """RMS and effective rank of an activation (R, B, …) per row."""
        columns = (h.movedim(2, -1) if h.dim() == 5 else h).flatten(1, -2).float()  # (R, positions, channels)
        rms = columns.square().mean((1, 2)).sqrt()
        centred = columns - columns.mean(1, keepdim=True)
        covariance = centred.transpose(1, 2) @ centred / columns.shape[1]
        trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
        square = covariance.square().sum((1, 2))
        tiny = torch.finfo(torch.float32).tiny
        return rms, trace.square() / square.clamp(min=tiny) / columns.shape[2]

    def _offers(self, slot_id: str, h: Tensor, g: Tensor) -> Tensor:
        """(R, B): |∂L/∂scale| of every blueprint in one slot."""
        rows, images = h.shape[0], h.dim() == 5
        flat, conductance = h.flatten(0, 1), self.fleet.host.buffers["conductance"][:, self.fleet.places[slot_id]]
        zero = torch.zeros(rows, device=h.device)
        worths = []
        for name in self.names:
            probe = self._probes.get((slot_id, name))
            if probe is None:
                worths.append(zero)
                continue
            product = (probe(flat).view(h.shape) * g).float()
            axes = (1, 3, 4) if images else tuple(range(1, h.dim() - 1))
            worths.append(product.sum(axes).norm(dim=1) * conductance.float())
        return torch.stack(worths, 1)
