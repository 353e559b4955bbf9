"""What an episode costs: the work of all its passes, in units of the plain host's own training.

Work is the multiply-adds of products and convolutions, counted per input and row; norms, activations, pooling and the
controller's own network are left out. A forward pass counts once, the gradients of activations once more, those of
weights once more. A row that is born at a slot is charged from there on. Controls are a yardstick and cost nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina import BlueprintRegistry, Host, SeedState
from esper.leyline import ACTIVE_STAGES, SeedStage, SlotSpec
from esper.tolaria import HostFleet, Task

Array = NDArray[np.float64]

PASSES = ("training", "shadow", "validation", "ablation", "calibration", "probing")
"""Main rows and shadow rows of minibatches; main rows on the validation (or test) images; rows of auditions and of
silenced seeds there; all those rows on the calibration batch; probes of the slots."""
_THROUGH, _FULL = 2, 3
"""Forward and the gradients of activations; and those of weights."""
_INPUTS = 2
"""In the pass that work is counted by."""


class Structure(NamedTuple):
    """Which seeds are where, (n, slots)."""

    stage: Array
    blueprint: Array
    """Number in the slot config's list of names; −1: none"""

    @classmethod
    def of(cls, stage: Tensor, blueprint: Tensor) -> "Structure":
        """From the columns of a `SlotView`. Host sync: two small tensors."""
        return cls(stage.cpu().numpy().astype(float), blueprint.cpu().numpy().astype(float))

    @classmethod
    def of_states(cls, states: Sequence[Mapping[str, SeedState]], names: Sequence[str]) -> "Structure":
        """From the states of some envs."""
        stage = [[float(state.stage) for state in env.values()] for env in states]
        blueprint = [
            [-1.0 if state.blueprint is None else float(names.index(state.blueprint)) for state in env.values()]
            for env in states
        ]
        return cls(np.array(stage), np.array(blueprint))


class CostMeter:
    """Adds up the work of one episode of a fleet's envs after another."""

    def __init__(self, fleet: HostFleet, *, final: bool = False, plain: Task | None = None) -> None:
        """`final`: hardened hosts are scored on test images. `plain` has the host whose training is the unit, if it is
        not the fleet's own."""
        self._fleet = fleet
        task, batches = fleet.task, fleet.batches
        calibration = batches.calibration(task.calibration_size)
        self._batch, self._calibration = task.batch, len(calibration)
        self._validation = len(batches.validation().inputs)
        self._hardened = len(batches.test().inputs) if final else self._validation
        self._minibatches, self._shadows = task.batches_per_step, fleet.isolation == "shadow"
        inputs = calibration[:_INPUTS].cpu()
        segments = _segment_work(task.build_host(), inputs)
        places = np.array(list(fleet.places.values()))
        self._host = float(segments.sum())
        self._below = np.array([segments[place + 1 :].sum() for place in places])
        """(slots,): of the segments behind each slot"""
        self._later = (places[None, :] > places[:, None]).astype(float)
        names = task.slot_config.blueprint_names
        self._covariances = sum(slot.width * math.prod(_shape(slot)) for slot in fleet.slots.values())
        self._seeds = np.array([[_seed_work(slot, name) for name in names] for slot in fleet.slots.values()])
        plain_host = self._host if plain is None else float(_segment_work(plain.build_host(), inputs).sum())
        self._unit = _FULL * plain_host * task.steps * self._minibatches * self._batch
        self.begin(())

    def begin(self, envs: Sequence[int]) -> None:
        """Start counting an episode of these envs."""
        self._envs, self._parts = envs, {name: np.zeros(len(envs)) for name in PASSES}

    def structure(self) -> Structure:
        """The structure of the envs as it is now."""
        states = [self._fleet.states[env] for env in self._envs]
        return Structure.of_states(states, self._fleet.task.slot_config.blueprint_names)

    def train(self, structure: Structure) -> None:
        """A step of minibatches: main rows, and a shadow row per seed in TRAINING; trained straight through the main
        row, such a seed costs its own work alone."""
        acting, inputs = self._acting(structure), self._minibatches * self._batch
        training = structure.stage == SeedStage.TRAINING
        shadows = training * _FULL * self._own(structure)
        if self._shadows:
            shadows = shadows + training * _THROUGH * self._behind(acting)
        self._parts["training"] += inputs * _FULL * self._main(acting)
        self._parts["shadow"] += inputs * shadows.sum(1)

    def measure(self, structure: Structure) -> None:
        """A validation: main rows, auditions, and every acting seed silenced; each calibrated."""
        acting, training = self._acting(structure), structure.stage == SeedStage.TRAINING
        rows = (training | _is_active(structure)) * self._behind(acting)
        extra = (rows + training * self._own(structure)).sum(1)
        self._parts["validation"] += self._validation * self._main(acting)
        self._parts["ablation"] += self._validation * extra
        self._parts["calibration"] += self._calibration * (self._main(acting) + extra)

    def harden(self, structure: Structure) -> None:
        """The last score: fossils alone."""
        fossils = (structure.stage == SeedStage.FOSSILIZED) * self._own(structure)
        self._parts["validation"] += self._hardened * self._main(fossils)
        self._parts["calibration"] += self._calibration * self._main(fossils)

    def probe(self, structure: Structure) -> None:
        """One minibatch forward, back to the first slot, through a newborn of every blueprint, and the covariances."""
        acting = self._acting(structure)
        back = self._below.max() + acting.sum(1)
        self._parts["probing"] += self._batch * (self._main(acting) + back + self._seeds.sum() + self._covariances)

    def cost(self) -> dict[str, list[float]]:
        """By kind of pass, a number per env, in units of the plain host's training."""
        return {name: (part / self._unit).tolist() for name, part in self._parts.items()}

    def _own(self, structure: Structure) -> Array:
        """(n, slots): work of the seed in each slot, per input."""
        slots = np.arange(len(self._seeds))[None, :]
        found = self._seeds[slots, structure.blueprint.astype(int)]
        return np.where(structure.blueprint >= 0, found, 0.0)

    def _acting(self, structure: Structure) -> Array:
        """(n, slots): the same for seeds that act on the main row."""
        return np.where(_is_active(structure), self._own(structure), 0.0)

    def _main(self, acting: Array) -> Array:
        work: Array = self._host + acting.sum(1)
        return work

    def _behind(self, acting: Array) -> Array:
        """(n, slots): what a row that is born at each slot goes through after it."""
        work: Array = self._below + acting @ self._later.T
        return work


def _is_active(structure: Structure) -> NDArray[np.bool_]:
    return np.isin(structure.stage, [float(stage) for stage in ACTIVE_STAGES])


@torch.no_grad()
def _segment_work(host: Host, x: Tensor) -> Array:
    """Multiply-adds per input and segment."""
    work = []
    for index in range(len(host.segments)):
        with FlopCounterMode(display=False) as counter:
            x, _ = host.run_segment(index, x, False)
        work.append(counter.get_total_flops() / 2 / _INPUTS)
    return np.array(work)


@torch.no_grad()
def _seed_work(slot: SlotSpec, name: str) -> float:
    """Multiply-adds per input of a blueprint; 0 where it is not offered."""
    if name not in [offer.name for offer in slot.blueprints]:
        return 0.0
    seed: nn.Module = BlueprintRegistry.build(slot.topology, name, slot.width, resolution=slot.resolution)
    with FlopCounterMode(display=False) as counter:
        seed(torch.zeros(_INPUTS, *_shape(slot)))
    return float(counter.get_total_flops()) / 2 / _INPUTS


def _shape(slot: SlotSpec) -> tuple[int, ...]:
    """Of one input's activation at a slot."""
    if slot.topology == "image":
        assert slot.resolution is not None, "image slots state their resolution"
        return slot.width, slot.resolution, slot.resolution
    return (slot.width,) if slot.resolution is None else (slot.resolution, slot.width)
