"""What a controller may look at, for a whole fleet at once.

Tensors over envs (N,), envs and slots (N, S), or envs, slots and blueprints (N, S, B). Losses are in units of the
task's random-guess loss; accuracies, gains and contributions in points (percent) unless something else is said. What
may be unmeasured has a validity bit of its own, and its value is 0 there.
"""

from typing import NamedTuple

from torch import Tensor


class Measured(NamedTuple):
    """A measurement that may be missing."""

    value: Tensor
    error: Tensor
    """Its standard error, paired over the same images."""
    valid: Tensor
    """bool"""


class HostView(NamedTuple):
    """Each host, (N,)."""

    time_left: Tensor
    """(T − t) / T"""
    train_loss: Tensor
    validation_loss: Tensor
    accuracy: Tensor
    accuracy_change: Tensor
    """Since the step before; 0 in the first."""
    best_accuracy: Tensor
    stale: Tensor
    """Share of the episode since the best accuracy was reached."""
    grown: Tensor
    """Grown parameters over the host's."""
    budget_left: Tensor
    """Share of the parameter budget."""
    last_op: Tensor
    """long; WAIT before the first action"""
    last_succeeded: Tensor
    """bool"""


class SlotView(NamedTuple):
    """Each slot, occupied or not, (N, S)."""

    width: Tensor
    depth: Tensor
    """0 at the host's input, 1 at its output."""
    rms: Tensor
    rank: Tensor
    """Share of channels that vary on their own."""
    gradient: Tensor
    """Share of the loss gradient's norm, over slots."""
    stage: Tensor
    """long"""
    blueprint: Tensor
    """long; −1: none"""
    alpha: Tensor
    alpha_target: Tensor
    ramping: Tensor
    """bool"""
    steps_in_stage: Tensor
    age: Tensor
    """Steps since germination."""
    cooldown: Tensor
    can_advance: Tensor
    """bool: the gate to BLENDING would pass"""
    can_fossilize: Tensor
    """bool"""
    can_prune: Tensor
    """bool"""
    can_retarget: Tensor
    """bool: HOLDING, so that its alpha may be sent elsewhere"""
    audition: Measured
    audition_loss: Tensor
    """The same by loss: how much lower the shadow row's is; valid with the audition."""
    contribution: Measured
    contribution_loss: Tensor
    seed_gradient: Measured
    """Norm of the seed's gradient; no error."""
    tried: Tensor
    """Seeds that were germinated here before."""
    best: Measured
    """The best contribution of any seed here so far; no error."""


class OfferView(NamedTuple):
    """Each blueprint in each slot, (N, S, B)."""

    worth: Tensor
    """First-order audition: |∂L/∂scale| of a seed that is not there, relative to the env's largest."""
    fits: Tensor
    """bool: topology, width and what is left of the budget allow it"""
    cost: Tensor
    """Parameters over the host's."""


class CriticView(NamedTuple):
    """What only the critic may know, (N,)."""

    potential: Tensor
    """Φ now"""
    control_accuracy: Tensor
    control_change: Tensor
    """Since the step before."""
    control_end: Tensor
    """What the control comes to: put in when the episode is over, until then as it is now."""


class TrainingSignals(NamedTuple):
    """Everything, after a step."""

    hosts: HostView
    slots: SlotView
    offers: OfferView
    critic: CriticView
