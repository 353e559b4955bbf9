"""Measurements of a whole fleet: scores of rows, auditions and contributions of seeds, and probes of empty slots."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from esper.kasmina import SeedState, lifecycle
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.compare import Comparison, RowScore, paired_differences
from esper.kasmina.layers import Scale
from esper.kasmina.row_layout import STORED, has_kernels
from esper.kasmina.stages import Chain, Squeeze, describe, fits
from esper.leyline import SeedStage, SlotSpec, derive_seed
from esper.tolaria.banks import StackedWeights
from esper.tolaria.batches import Samples
from esper.tolaria.memory import ValidationMemory
from esper.tolaria.passes import row_losses, score_rows
from esper.tolaria.rows import deployed_rows, eval_rows

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

TINY = torch.finfo(torch.float32).tiny
PROBED_ROWS = 8
"""On the CPU a fleet's newborns see a multiple of this number of rows. Convolutions and products choose their kernels,
and so the last bits of their results, by the number of images; with spare rows no bit depends on the fleet's size."""


def measure(fleet: "HostFleet", memory: ValidationMemory, *, deployed: bool = True) -> list[Comparison]:
    """Audition every TRAINING seed and silence every acting one, in each env; records the results in their states.
    Without `deployed` it omits the pass with running statistics, which only a report needs."""
    samples, calibration = memory.samples, memory.calibration
    comparisons: list[Comparison] = []
    for envs, chunk in memory.divide(range(len(fleet.host.weights)), fleet.validation_bytes):
        rows, seed_of = eval_rows(fleet, envs)
        scores = score_rows(fleet, rows, samples, calibration, chunk=chunk)
        running: list[RowScore] | list[None] = [None] * len(envs)
        if deployed:
            running = score_rows(fleet, deployed_rows(fleet, envs), samples, None, chunk=chunk)
        comparisons += [Comparison(*both, {}, {}) for both in zip(scores[: len(envs)], running, strict=True)]
        _compare_seeds(fleet.states, comparisons, scores, seed_of)
    return comparisons[: fleet.n]


def measure_committed(fleet: "HostFleet", memory: ValidationMemory, samples: Samples) -> list[RowScore]:
    """Score every host with its fossils alone, as it will be hardened, calibrated, on these samples."""
    scores: list[RowScore] = []
    for envs, chunk in memory.divide(range(len(fleet.host.weights)), fleet.validation_bytes):
        rows = deployed_rows(fleet, envs, (SeedStage.FOSSILIZED,))
        scores += score_rows(fleet, rows, samples, memory.calibration, chunk=chunk)
    return scores[: fleet.n]


def _compare_seeds(
    states: Sequence[dict[str, SeedState]],
    comparisons: Sequence[Comparison],
    scores: Sequence[RowScore],
    seed_of: Mapping[int, tuple[int, str]],
) -> None:
    """Compare the row of each seed, an (env, slot) by the row's number, with its env's main row. Record the differences
    in the comparisons and in the seeds' states."""
    rows = [scores[row] for row in seed_of]
    mains = [comparisons[env].main for env, _ in seed_of.values()]
    # An audition is the row's advantage over the main row, a contribution that of the main row over it.
    trains = [states[env][slot_id].stage is SeedStage.TRAINING for env, slot_id in seed_of.values()]
    pairs = [(row, main) if training else (main, row) for row, main, training in zip(rows, mains, trains, strict=True)]
    differences = paired_differences(*(list(part) for part in zip(*pairs, strict=True))) if pairs else []
    for (env, slot_id), training, difference in zip(seed_of.values(), trains, differences, strict=True):
        if training:
            comparisons[env].auditions[slot_id] = difference
            states[env][slot_id] = lifecycle.record_audition(states[env][slot_id], difference.points)
        else:
            comparisons[env].contributions[slot_id] = difference
            states[env][slot_id] = lifecycle.record_contribution(states[env][slot_id], difference.points)


class Sensing(NamedTuple):
    """The result of a probe, per env and slot (N, S)."""

    rms: Tensor  # root mean square of the activation
    rank: Tensor  # effective rank of its channels: (Σλ)²/Σλ² of their covariance, divided by their number
    gradient: Tensor  # norm of the loss gradient there, relative to the sum over slots
    # (N, S, B): first-order worth of each blueprint, relative to the largest of the env; 0 where it does not fit.
    offers: Tensor


class Taps(NamedTuple):
    """What a probe reads of R rows."""

    streams: Sequence[Tensor]  # the activation (R, B, …) at each slot
    gradients: Sequence[Tensor]  # of the loss there, alike
    conductance: Tensor  # (R, S)


Newborns = Mapping[tuple[str, str], nn.Module]
"""By slot and blueprint, a seed that was just born, but with scale 1."""


def make_newborns(
    slots: Mapping[str, SlotSpec], device: torch.device, dtype: torch.dtype
) -> dict[tuple[str, str], nn.Module]:
    """One newborn of every blueprint per slot, with scale 1."""
    return {
        (slot_id, offer.name): _newborn(slot, offer.name).to(device=device, dtype=dtype)
        for slot_id, slot in slots.items()
        for offer in slot.blueprints
    }


def _newborn(slot: SlotSpec, name: str) -> nn.Module:
    rng_seed = derive_seed("probe", slot.slot_id, name)
    module = BlueprintRegistry.build(slot.topology, name, slot.width, resolution=slot.resolution, rng_seed=rng_seed)
    for part in module.modules():
        if isinstance(part, Scale):
            nn.init.ones_(part.weight)
    return module.requires_grad_(False)


@torch.no_grad()
def sense(
    names: Sequence[str],
    slot_ids: Sequence[str],
    newborns: Newborns,
    streams: Sequence[Tensor],
    gradients: Sequence[Tensor],
    conductance: Tensor,
    multiple: int = 1,
) -> Sensing:
    """Sense R rows from the stream (R, B, …) at each slot, the loss gradient there, and the conductance (R, S).

    A seed's effect is y = h + c·scale·f(h), where c is what the host lets through, its conductance. It is born with
    scale = 0, so the first-order worth of a blueprint in a slot is |∂L/∂scale| = |c · Σ g·f(h)| with g = ∂L/∂h.
    Newborns see a multiple of `multiple` rows. No device sync.
    """
    rms, rank = (torch.stack(columns, 1) for columns in zip(*map(_shape_of, streams), strict=True))
    norms = torch.stack([g.flatten(1).float().norm(dim=1) for g in gradients], 1)
    gradient = norms / norms.sum(1, keepdim=True).clamp(min=TINY)
    worths = [
        worths_of([newborns.get((slot_id, name)) for name in names], *(_filled(part, multiple) for part in taps))
        for slot_id, *taps in zip(slot_ids, streams, gradients, conductance.unbind(1), strict=True)
    ]
    offers = torch.stack(worths, 1)[: len(conductance)]
    offers = offers / offers.flatten(1).amax(1).clamp(min=TINY)[:, None, None]
    return Sensing(rms, rank, gradient, offers)


def worths_of(seeds: Sequence[nn.Module | None], h: Tensor, g: Tensor, conductance: Tensor) -> Tensor:
    """|∂L/∂scale| (R, seeds) of newborns in one slot; 0 where there is none."""
    worths = torch.zeros(len(h), len(seeds), device=h.device)
    by_kernels = has_kernels(h)
    stored, arrived = (part.permute(STORED["cuda"]).contiguous() if by_kernels else part for part in (h, g))
    for index, seed in enumerate(seeds):
        if seed is None:
            continue
        program, matrix = _program_of(seed) if by_kernels else (None, None)
        if program is not None and matrix is not None and fits(program, h.shape[-2] * h.shape[-1]):
            from esper.kasmina.kernels.programs import worth  # needs triton, which only CUDA builds bring along

            to_scale = worth(program, stored, arrived, matrix)
        else:
            axes = (1, 3, 4) if h.dim() == 5 else tuple(range(1, h.dim() - 1))
            to_scale = (seed(h.flatten(0, 1)).view(h.shape) * g).float().sum(axes)
        worths[:, index] = to_scale.norm(dim=1) * conductance.float()
    return worths


_PROGRAMS: WeakKeyDictionary[nn.Module, tuple[Chain | Squeeze | None, Tensor]] = WeakKeyDictionary()


def _program_of(seed: nn.Module) -> tuple[Chain | Squeeze | None, Tensor]:
    """A seed as stages, if it can be said in them, and its parameters (1, P)."""
    if seed not in _PROGRAMS:
        parameters = dict(seed.named_parameters())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        weights = StackedWeights(1, shapes, next(seed.parameters()).device, torch.float32)
        weights.write(0, parameters)
        _PROGRAMS[seed] = describe(seed, weights.columns, prefix=""), weights.matrix
    return _PROGRAMS[seed]


class Prober:
    """Probes the slots of a fleet without growing anything: one backward pass over a minibatch, no weight changes. All
    envs share the newborns."""

    def __init__(self, fleet: "HostFleet") -> None:
        self.fleet = fleet
        self.names = fleet.slot_config.blueprint_names
        self.newborns = make_newborns(fleet.slots, fleet.device, fleet.compute)

    def __call__(self) -> Sensing:
        """Probe all envs on the minibatch that they will train on next. No device sync."""
        return self.sense_rows(self.next_taps(), range(self.fleet.n))

    def next_taps(self) -> Taps:
        """Those of the minibatch that all envs will train on next."""
        return self.taps(self.fleet.step_index * self.fleet.task.batches_per_step)

    def sense_rows(self, taps: Taps, rows: range) -> Sensing:
        """What the taps of these rows tell of their slots."""
        streams, gradients = (
            [part[rows.start : rows.stop] for part in parts] for parts in (taps.streams, taps.gradients)
        )
        conductance = taps.conductance[rows.start : rows.stop]
        multiple = PROBED_ROWS if self.fleet.device.type == "cpu" else 1
        return sense(self.names, list(self.fleet.slots), self.newborns, streams, gradients, conductance, multiple)

    def taps(self, minibatch: int) -> Taps:
        """One backward pass of all envs over the minibatch with this number of the episode."""
        fleet, places = self.fleet, self.fleet.places.values()
        inputs, targets = fleet.draw(minibatch)
        result = fleet.host.run(fleet.update_plan().main, inputs, train=True, tapped=places)
        streams = [result.taps[place] for place in places]
        gradients = torch.autograd.grad(row_losses(result.output, targets).sum(), streams)
        conductance = torch.stack([fleet.host.buffers["conductance"][:, place] for place in places], 1)
        return Taps(streams, gradients, conductance)


def _filled(rows: Tensor, multiple: int) -> Tensor:
    """Rows (R, …), the last one repeated until their number is a multiple."""
    spare = -len(rows) % multiple
    return torch.cat([rows, rows[-1:].expand(spare, *rows.shape[1:])]) if spare else rows


def _shape_of(h: Tensor) -> tuple[Tensor, Tensor]:
    """RMS and effective rank of an activation (R, B, …) per row."""
    columns = (h.movedim(2, -1) if h.dim() == 5 else h).flatten(1, -2).float()  # (R, positions, channels)
    rms = columns.square().mean((1, 2)).sqrt()
    centred = columns - columns.mean(1, keepdim=True)
    covariance = centred.transpose(1, 2) @ centred / columns.shape[1]
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    square = covariance.square().sum((1, 2))
    return rms, trace.square() / square.clamp(min=TINY) / columns.shape[2]
