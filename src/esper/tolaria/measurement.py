"""Measurements of a whole fleet: scores of rows, auditions and contributions of seeds, and probes of empty slots."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina import lifecycle
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.compare import PairedDifference, RowScore, paired_difference
from esper.kasmina.layers import Scale
from esper.leyline import SeedStage, SlotSpec, derive_seed
from esper.tolaria.batches import Samples
from esper.tolaria.memory import ValidationMemory
from esper.tolaria.passes import row_losses, score_rows
from esper.tolaria.rows import deployed_rows, eval_rows

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

TINY = torch.finfo(torch.float32).tiny


class FleetComparison(NamedTuple):
    """Scores by env, and differences by (env, slot)."""

    main: list[RowScore]
    deployed: list[RowScore]
    auditions: dict[tuple[int, str], PairedDifference]
    contributions: dict[tuple[int, str], PairedDifference]


def measure(fleet: "HostFleet", memory: ValidationMemory, *, deployed: bool = True) -> FleetComparison:
    """Audition every TRAINING seed and silence every acting one; records the results in their states. Without
    `deployed` it omits the pass with running statistics, which only a report needs."""
    samples, calibration = memory.samples, memory.calibration
    comparison = FleetComparison([], [], {}, {})
    for envs, chunk in memory.divide(range(len(fleet.host.weights)), fleet.validation_bytes):
        rows, seed_of = eval_rows(fleet, envs)
        scores = score_rows(fleet, rows, samples, calibration, chunk=chunk)
        comparison.main.extend(scores[: len(envs)])
        if deployed:
            comparison.deployed.extend(score_rows(fleet, deployed_rows(fleet, envs), samples, None, chunk=chunk))
        for row, (env, slot_id) in seed_of.items():
            _compare_seed(fleet, comparison, env, slot_id, scores[row])
    return comparison._replace(main=comparison.main[: fleet.n], deployed=comparison.deployed[: fleet.n])


def measure_committed(fleet: "HostFleet", memory: ValidationMemory, samples: Samples) -> list[RowScore]:
    """Score every host with its fossils alone, as it will be hardened, calibrated, on these samples."""
    scores: list[RowScore] = []
    for envs, chunk in memory.divide(range(len(fleet.host.weights)), fleet.validation_bytes):
        rows = deployed_rows(fleet, envs, (SeedStage.FOSSILIZED,))
        scores += score_rows(fleet, rows, samples, memory.calibration, chunk=chunk)
    return scores[: fleet.n]


def _compare_seed(fleet: "HostFleet", comparison: FleetComparison, env: int, slot_id: str, row: RowScore) -> None:
    """Compare a seed's row with its env's main row, and record the difference in its state."""
    state, main = fleet.states[env][slot_id], comparison.main[env]
    if state.stage is SeedStage.TRAINING:
        audition = comparison.auditions[env, slot_id] = paired_difference(row, main)
        fleet.states[env][slot_id] = lifecycle.record_audition(state, audition.accuracy)
    else:
        contribution = comparison.contributions[env, slot_id] = paired_difference(main, row)
        fleet.states[env][slot_id] = lifecycle.record_contribution(state, contribution.accuracy)


class Sensing(NamedTuple):
    """The result of a probe, per env and slot (N, S)."""

    rms: Tensor  # root mean square of the activation
    rank: Tensor  # effective rank of its channels: (Σλ)²/Σλ² of their covariance, divided by their number
    gradient: Tensor  # norm of the loss gradient there, relative to the sum over slots
    # (N, S, B): first-order worth of each blueprint, relative to the largest of the env; 0 where it does not fit.
    offers: Tensor


class Prober:
    """Probes the slots of a fleet without growing anything: one backward pass over a minibatch, no weight changes.

    A seed's effect is y = h + c·scale·f(h), where c is what the host lets through. It is born with scale = 0, so the
    first-order worth of a blueprint in a slot is |∂L/∂scale| = |c · Σ g·f(h)| with g = ∂L/∂h. The prober holds one
    newborn of every blueprint per slot, with scale 1, for all envs.
    """

    def __init__(self, fleet: "HostFleet") -> None:
        self.fleet = fleet
        self.names = fleet.task.slot_config.blueprint_names
        self._newborns = {
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
        """Probe all envs on the minibatch that they will train on next. No device sync."""
        fleet = self.fleet
        inputs, targets = fleet.draw(fleet.step_index * fleet.task.batches_per_step)
        result = fleet.host.run(fleet.update_plan().main, inputs, train=True, tapped=fleet.places.values())
        streams = [result.taps[place] for place in fleet.places.values()]
        gradients = torch.autograd.grad(row_losses(result.output, targets).sum(), streams)
        with torch.no_grad():
            rms, rank = (torch.stack(columns, 1) for columns in zip(*map(_shape_of, streams), strict=True))
            norms = torch.stack([g.flatten(1).float().norm(dim=1) for g in gradients], 1)
            gradient = norms / norms.sum(1, keepdim=True).clamp(min=TINY)
            worths = [self._worths(*slot) for slot in zip(fleet.slots, streams, gradients, strict=True)]
            offers = torch.stack(worths, 1)
            offers = offers / offers.flatten(1).amax(1).clamp(min=TINY)[:, None, None]
            return Sensing(*(column[: fleet.n] for column in (rms, rank, gradient, offers)))

    def _worths(self, slot_id: str, h: Tensor, g: Tensor) -> Tensor:
        """(R, B): |∂L/∂scale| of every blueprint in one slot."""
        flat, conductance = h.flatten(0, 1), self.fleet.host.buffers["conductance"][:, self.fleet.places[slot_id]]
        axes = (1, 3, 4) if h.dim() == 5 else tuple(range(1, h.dim() - 1))
        worths = torch.zeros(len(h), len(self.names), device=h.device)
        for index, name in enumerate(self.names):
            if (slot_id, name) in self._newborns:
                product = (self._newborns[slot_id, name](flat).view(h.shape) * g).float()
                worths[:, index] = product.sum(axes).norm(dim=1) * conductance.float()
        return worths


def _shape_of(h: Tensor) -> tuple[Tensor, Tensor]:
    """RMS and effective rank of an activation (R, B, …) per row."""
    columns = (h.movedim(2, -1) if h.dim() == 5 else h).flatten(1, -2).float()  # (R, positions, channels)
    rms = columns.square().mean((1, 2)).sqrt()
    centred = columns - columns.mean(1, keepdim=True)
    covariance = centred.transpose(1, 2) @ centred / columns.shape[1]
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    square = covariance.square().sum((1, 2))
    return rms, trace.square() / square.clamp(min=TINY) / columns.shape[2]
