"""What an episode costs: the work of all its passes, in units of the plain host's own training.

Work is the number of multiply-adds in products and convolutions, per input and row. Norms, activations, pooling and the
controller's own network are not counted. A forward pass counts once, the gradients of activations once more, and those
of weights once more. A row that starts at a slot is charged from there on. Controls cost nothing.
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

# Main rows and shadow rows of minibatches. Main rows on validation or test images. Rows of auditions and of silenced
# seeds there. All those rows on the calibration batch. Probes of the slots.
PASSES = ("training", "shadow", "validation", "ablation", "calibration", "probing")
_THROUGH, _FULL = 2, 3  # passes: forward and the gradients of activations; these and the gradients of weights
_INPUTS = 2  # inputs of the pass that work is counted on


class Structure(NamedTuple):
    """The seeds of every env, (n, slots)."""

    stage: Array
    blueprint: Array  # index in the slot config's blueprint names; −1: none

    @classmethod
    def of(cls, stage: Tensor, blueprint: Tensor) -> "Structure":
        """From the columns of a `SlotView`. Device sync: two small tensors."""
        return cls(stage.cpu().numpy().astype(float), blueprint.cpu().numpy().astype(float))

    @classmethod
    def of_states(cls, states: Sequence[Mapping[str, SeedState]], names: Sequence[str]) -> "Structure":
        """From the states of some envs."""
        stage = [[float(state.stage) for state in env.values()] for env in states]
        index: dict[str | None, float] = {None: -1.0, **{name: float(i) for i, name in enumerate(names)}}
        return cls(np.array(stage), np.array([[index[state.blueprint] for state in env.values()] for env in states]))


class CostMeter:
    """Counts the work of a fleet's envs, one episode after the other."""

    def __init__(self, fleet: HostFleet, *, final: bool = False, plain: Task | None = None) -> None:
        """`final`: hardened hosts are scored on test images. `plain`: the task whose host is the unit."""
        self._fleet, task, batches = fleet, fleet.task, fleet.batches
        calibration = batches.calibration(task.calibration_size)
        self._batch, self._calibration = task.batch, len(calibration)
        self._validation = len(batches.validation().inputs)
        self._hardened = len((batches.test() if final else batches.end()).inputs)
        self._minibatches, self._shadows = task.batches_per_step, fleet.isolation == "shadow"
        inputs = calibration[:_INPUTS].to("meta")
        segments = _segment_work(task.build_host(), inputs)
        positions = np.array(list(fleet.places.values()))
        self._host = float(segments.sum())
        # (slots,): segments behind each
        self._below = np.array([segments[position + 1 :].sum() for position in positions])
        self._later = (positions[None, :] > positions[:, None]).astype(float)
        self._covariances = sum(slot.width * math.prod(_shape(slot)) for slot in fleet.slots.values())
        self._names = task.slot_config.blueprint_names
        self._seeds = np.array([[_seed_work(slot, name) for name in self._names] for slot in fleet.slots.values()])
        plain_host = self._host if plain is None else float(_segment_work(plain.build_host(), inputs).sum())
        self._unit = _FULL * plain_host * task.steps * self._minibatches * self._batch
        self.begin(())

    def begin(self, envs: Sequence[int]) -> None:
        """Start counting an episode of these envs."""
        self._envs, self._parts = envs, {name: np.zeros(len(envs)) for name in PASSES}

    def structure(self) -> Structure:
        """The structure of the envs as it is now."""
        return Structure.of_states([self._fleet.states[env] for env in self._envs], self._names)

    def train(self, structure: Structure) -> None:
        """Count a step of minibatches: main rows, and a shadow row (straight through: a seed) per seed in TRAINING."""
        own, _, main, behind = self._work(structure)
        training, inputs = structure.stage == SeedStage.TRAINING, self._minibatches * self._batch
        shadows = training * _FULL * own + (training * _THROUGH * behind if self._shadows else 0.0)
        self._parts["training"] += inputs * _FULL * main
        self._parts["shadow"] += inputs * shadows.sum(1)

    def measure(self, structure: Structure) -> None:
        """Count a validation: main rows, auditions, and every acting seed silenced, each calibrated."""
        own, _, main, behind = self._work(structure)
        training = structure.stage == SeedStage.TRAINING
        extra = ((training | _is_active(structure)) * behind + training * own).sum(1)
        self._parts["validation"] += self._validation * main
        self._parts["ablation"] += self._validation * extra
        self._parts["calibration"] += self._calibration * (main + extra)

    def harden(self, structure: Structure) -> None:
        """Count the last score, with fossils alone."""
        own, *_ = self._work(structure)
        main = self._host + ((structure.stage == SeedStage.FOSSILIZED) * own).sum(1)
        self._parts["validation"] += self._hardened * main
        self._parts["calibration"] += self._calibration * main

    def probe(self, structure: Structure) -> None:
        """Count one minibatch forward, back to the first slot, a newborn of every blueprint, and the covariances."""
        _, acting, main, _ = self._work(structure)
        back = self._below.max() + acting.sum(1)
        self._parts["probing"] += self._batch * (main + back + self._seeds.sum() + self._covariances)

    def cost(self) -> dict[str, list[float]]:
        """By kind of pass, a number per env, in units of the plain host's training."""
        return {name: (part / self._unit).tolist() for name, part in self._parts.items()}

    def _work(self, structure: Structure) -> tuple[Array, Array, Array, Array]:
        """Work per input. Of the seed in each slot, and of those that act on the main row: (n, slots). Of the main row:
        (n,). Of what a row that starts at a slot passes after it: (n, slots)."""
        slots = np.arange(len(self._seeds))[None, :]
        own = np.where(structure.blueprint >= 0, self._seeds[slots, structure.blueprint.astype(int)], 0.0)
        acting = np.where(_is_active(structure), own, 0.0)
        return own, acting, self._host + acting.sum(1), self._below + acting @ self._later.T


def _is_active(structure: Structure) -> NDArray[np.bool_]:
    return np.isin(structure.stage, [float(stage) for stage in ACTIVE_STAGES])


@torch.no_grad()
def _segment_work(host: Host, x: Tensor) -> Array:
    """Multiply-adds of every segment per input. On the meta device nothing is computed, and convolutions are counted as
    such, however the CPU may do them."""
    work, host = [], host.to("meta")
    for index in range(len(host.segments)):
        with FlopCounterMode(display=False) as counter:
            x, _ = host.run_segment(index, x, False)
        work.append(counter.get_total_flops() / 2 / _INPUTS)
    return np.array(work)


@torch.no_grad()
def _seed_work(slot: SlotSpec, name: str) -> float:
    """Multiply-adds per input of a blueprint; 0 if the slot does not offer it."""
    if name not in [offer.name for offer in slot.blueprints]:
        return 0.0
    seed: nn.Module = BlueprintRegistry.build(slot.topology, name, slot.width, resolution=slot.resolution)
    with FlopCounterMode(display=False) as counter:
        seed.to("meta")(torch.zeros(_INPUTS, *_shape(slot), device="meta"))
    return float(counter.get_total_flops()) / 2 / _INPUTS


def _shape(slot: SlotSpec) -> tuple[int, ...]:
    if slot.topology == "image":
        assert slot.resolution is not None, "image slots state their resolution"
        return slot.width, slot.resolution, slot.resolution
    return (slot.width,) if slot.resolution is None else (slot.resolution, slot.width)
