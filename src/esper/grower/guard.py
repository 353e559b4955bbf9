"""Undoing growth that made a model diverge.

After each healthy step at which seeds are alive that are not committed, the guard copies the model and the optimizer's
state to CPU memory. If the next validation loss is not finite, or far above all earlier ones, it restores the copy and
prunes the youngest of these seeds. While nothing grows it copies nothing.
"""

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.grower.growing_model import GrowingModel
from esper.kasmina.compare import RowScore
from esper.leyline import SeedStage, StageChange
from esper.leyline.records import Json
from esper.tolaria.governor import GovernorConfig, Symptom

LIMITS = GovernorConfig()  # the same as for built-in hosts


class CopiedTensor(NamedTuple):
    """A tensor in CPU memory, and the device that it came from: an optimizer may hold both kinds."""

    tensor: Tensor
    device: torch.device


class Snapshot(NamedTuple):
    """A model and its optimizer after a step."""

    step: int
    tensors: dict[str, Tensor]
    """Parameters that learn and buffers by name, on the CPU"""
    optimizer: dict[Tensor, Any]  # Any: whatever an optimizer stores per parameter


class Guard:
    """The snapshot of one growing model, and which losses are normal for it."""

    def __init__(self, growing: GrowingModel) -> None:
        self.growing = growing
        self.snapshot: Snapshot | None = None
        self.count, self.mean, self.square = 0, 0.0, 0.0
        """Number, mean and mean square of the healthy losses"""

    # -- judging ------------------------------------------------------------------------------------------------------

    def symptom(self, main: RowScore, loss: float, *, is_loss: bool) -> Symptom | None:
        """What is wrong with the model, if growth can be undone. `is_loss` is False for an accuracy from the user.

        `loss` is that of calibrated norms. A young seed changes quickly, and running statistics follow late. With those
        the loss may be far above all others for some steps, while the model trains well.
        """
        if self.snapshot is None:
            return None
        if not bool(main.losses.isfinite().all()):
            return Symptom.NOT_FINITE
        deviation = math.sqrt(max(0.0, self.square - self.mean**2))
        limit = max(self.mean + LIMITS.sigmas * deviation, LIMITS.multiple * self.mean)
        # The share of errors may well triple near zero, which is no divergence.
        return Symptom.DIVERGENCE if is_loss and self.count and loss > limit else None

    def observe(self, loss: float) -> None:
        """Count the loss of a healthy step as normal."""
        if math.isfinite(loss):
            self.count += 1
            self.mean += (loss - self.mean) / self.count
            self.square += (loss**2 - self.square) / self.count

    def notes(self) -> Json:
        """What later verdicts depend on, as JSON. The snapshot is what the state dicts hold anyway."""
        return [self.count, self.mean.hex(), self.square.hex()]

    def load(self, notes: Json) -> None:
        """Continue from these notes, without a snapshot."""
        self.snapshot = None
        self.count, self.mean, self.square = int(notes[0]), float.fromhex(notes[1]), float.fromhex(notes[2])

    # -- the snapshot -------------------------------------------------------------------------------------------------

    def uncommitted(self) -> dict[str, int]:
        """Age of each seed that is alive and not committed, by slot."""
        live = self.growing.live().items()
        return {slot_id: state.age for slot_id, state in live if state.stage is not SeedStage.FOSSILIZED}

    def take(self, step: int) -> None:
        """Copy the model and the optimizer's state after a step; if no seed could be undone, free the copy."""
        self.snapshot = None
        if self.uncommitted():
            frozen = {name for name, parameter in self.growing.host.named_parameters() if not parameter.requires_grad}
            tensors = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in self._tensors().items()
                if name not in frozen
            }
            state = {parameter: _copied(content) for parameter, content in self._optimizer.state.items()}
            self.snapshot = Snapshot(step, tensors, state)

    @torch.no_grad()
    def restore(self) -> None:
        """Put weights, statistics and the optimizer's state back. Learning rates stay: they follow their schedule."""
        assert self.snapshot is not None
        tensors = self._tensors()
        for name, tensor in self.snapshot.tensors.items():
            tensors[name].copy_(tensor)
        state = self._optimizer.state
        for parameter in list(state):
            if parameter not in self.snapshot.optimizer:
                del state[parameter]
        state.update({parameter: _returned(content) for parameter, content in self.snapshot.optimizer.items()})
        for parameter in self.growing.host.parameters():
            parameter.grad = None  # it belongs to the weights that are gone

    def undo(self) -> tuple[list[StageChange], str]:
        """Undo what growth has done since the last healthy step. Returns the changes of stage, and what was done."""
        assert self.snapshot is not None
        restored = self.snapshot.step
        self.restore()
        ticks = [change for _, change in self.growing.tick()]
        pruned = self.prune_youngest()
        named = ", ".join(f"{name} behind {change.slot_id}" for name, change in pruned)
        return [*ticks, *(change for _, change in pruned)], f"restored step {restored} and pruned {named}"

    def prune_youngest(self) -> list[tuple[str, StageChange]]:
        """Prune the youngest seeds that are not committed. Returns their blueprints and changes."""
        ages = self.uncommitted()
        youngest = [slot_id for slot_id, age in ages.items() if age == min(ages.values())]
        names = [self.growing.states[0][slot_id].blueprint or "the seed" for slot_id in youngest]
        return [(name, self.growing.prune(0, slot_id)) for name, slot_id in zip(names, youngest, strict=True)]

    @property
    def _optimizer(self) -> Optimizer:
        return self.growing.membership.optimizer

    def _tensors(self) -> dict[str, Tensor]:
        host = self.growing.host
        return dict(host.named_parameters()) | dict(host.named_buffers())


def _copied(content: Any) -> Any:  # Any: a part of an optimizer's state
    if isinstance(content, Tensor):
        return CopiedTensor(content.detach().to("cpu", copy=True), content.device)
    if isinstance(content, dict):
        return {key: _copied(value) for key, value in content.items()}
    return [_copied(value) for value in content] if isinstance(content, list) else copy.deepcopy(content)


def _returned(content: Any) -> Any:
    if isinstance(content, CopiedTensor):
        return content.tensor.to(content.device, copy=True)
    if isinstance(content, dict):
        return {key: _returned(value) for key, value in content.items()}
    return [_returned(value) for value in content] if isinstance(content, list) else copy.deepcopy(content)
