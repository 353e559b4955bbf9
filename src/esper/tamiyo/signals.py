"""What a controller may look at, for a whole fleet at once.

Tensors over envs (N,), envs and slots (N, S), or envs, slots and blueprints (N, S, B). Losses are in units of the
task's random-guess loss; accuracies, gains and contributions in points (percent). A value that may be unmeasured has a
validity bit; the value is 0 where the bit is not set.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Measured(NamedTuple):
    """A measurement that may be missing."""

    value: Tensor
    error: Tensor  # standard error, paired over the same images
    valid: Tensor


class HostView(NamedTuple):
    """Each host, (N,)."""

    time_left: Tensor  # (T − t) / T
    train_loss: Tensor
    validation_loss: Tensor
    accuracy: Tensor
    accuracy_change: Tensor  # since the previous step; 0 in the first
    best_accuracy: Tensor
    stale: Tensor  # share of the episode since the best accuracy
    grown: Tensor  # grown parameters divided by the host's
    budget_left: Tensor  # share of the parameter budget
    last_op: Tensor  # long; WAIT before the first action
    last_succeeded: Tensor  # bool


class SlotView(NamedTuple):
    """Each slot, occupied or not, (N, S). `features.SLOT_COLUMNS` declares the dtypes."""

    present: Tensor  # False: padding, where a policy is made for more slots than the host has
    width: Tensor
    depth: Tensor  # 0 at the host's input, 1 at its output
    rms: Tensor
    rank: Tensor  # effective rank of the activation divided by its channels
    gradient: Tensor  # share of the loss gradient's norm, over slots
    stage: Tensor
    blueprint: Tensor  # index of the blueprint, −1 if the slot is empty
    alpha: Tensor
    alpha_target: Tensor
    ramping: Tensor
    steps_in_stage: Tensor
    age: Tensor  # steps since germination
    cooldown: Tensor
    can_advance: Tensor  # the gate to BLENDING would pass
    can_fossilize: Tensor
    can_prune: Tensor
    can_retarget: Tensor  # HOLDING, so that its alpha target may change
    audition: Measured
    audition_loss: Tensor  # how much lower the shadow row's loss is; valid with the audition
    contribution: Measured
    contribution_loss: Tensor
    seed_gradient: Measured  # norm of the seed's gradient; no error
    tried: Tensor  # seeds germinated here so far
    best: Measured  # the best contribution of any seed here so far; no error

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> "SlotView":
        """The view of these columns: `x`, `x_error` (0 if missing) and `x_valid` form the measurement x."""
        fields: dict[str, Any] = {name: columns[name] for name in cls._fields}  # Any: tensors and measurements
        for name in [name for name in fields if f"{name}_valid" in columns]:
            error = columns.get(f"{name}_error", torch.zeros_like(columns[name]))
            fields[name] = Measured(columns[name], error, columns[f"{name}_valid"])
        return cls(**fields)

    def column(self, name: str) -> Tensor:
        """One column by its name in `features.SLOT_COLUMNS`."""
        if name not in self._fields:
            measurement, _, part = name.rpartition("_")
            measured: Tensor = getattr(getattr(self, measurement), part)
            return measured
        field: Tensor | Measured = getattr(self, name)
        return field.value if isinstance(field, Measured) else field


class OfferView(NamedTuple):
    """Each blueprint in each slot, (N, S, B)."""

    worth: Tensor  # first-order audition: |∂L/∂scale| of a seed at scale 0, relative to the env's largest
    fits: Tensor  # bool: topology, width and the remaining budget allow it
    cost: Tensor  # parameters divided by the host's


class CriticView(NamedTuple):
    """What only the critic may know, (N,)."""

    potential: Tensor  # Φ now
    control_accuracy: Tensor
    control_change: Tensor  # since the previous step
    control_end: Tensor  # the control's final accuracy, filled in after the episode; before, its current accuracy


class TrainingSignals(NamedTuple):
    """All views after a step."""

    hosts: HostView
    slots: SlotView
    offers: OfferView
    critic: CriticView
