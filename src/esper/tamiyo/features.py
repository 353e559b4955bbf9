"""Observations: the layout of their columns, and signals as features."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SeedStage, SlotConfig, UnknownNameError
from esper.leyline.numbers import require_whole
from esper.tamiyo.signals import CriticView, HostView, Measured, OfferView, SlotView, TrainingSignals


class Observation(NamedTuple):
    """A flat observation, taken apart; leading axes are kept."""

    host: Tensor
    """(…, host columns)"""
    slots: Tensor
    """(…, slots, slot columns)"""
    offers: Tensor
    """(…, slots, blueprints, offer columns)"""
    critic: Tensor
    """(…, critic columns): the actor never sees them."""


@dataclass(frozen=True)
class ObservationLayout:
    """Named columns and how many slots and blueprints there are. A plain vector has host columns alone."""

    host: tuple[str, ...]
    slot: tuple[str, ...] = ()
    offer: tuple[str, ...] = ()
    critic: tuple[str, ...] = ()
    slots: int = 0
    blueprints: int = 0

    def __post_init__(self) -> None:
        for name in ("slots", "blueprints"):
            require_whole(name, getattr(self, name), 0)
        if not self.size:
            raise BadValueError("an observation needs at least one column")
        if bool(self.slots) != bool(self.slot):
            raise BadValueError(f"{self.slots} slots of {len(self.slot)} columns; give both or neither")
        if self.offer and not self.slots * self.blueprints:
            raise BadValueError(f"columns of offers, but {self.slots} slots and {self.blueprints} blueprints")
        if repeated := {name for name in self.column_names if self.column_names.count(name) > 1}:
            raise BadValueError(f"column names must be unique; {sorted(repeated)} are not")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers in each of the four parts."""
        offers = self.slots * self.blueprints * len(self.offer)
        return len(self.host), self.slots * len(self.slot), offers, len(self.critic)

    @property
    def size(self) -> int:
        """Numbers in a flat observation."""
        return sum(self.sizes)

    def split(self, flat: Tensor) -> Observation:
        """Take a flat observation (…, size) apart, by views."""
        host, slots, offers, critic = flat.split(self.sizes, -1)
        return Observation(
            host,
            slots.unflatten(-1, (self.slots, len(self.slot))),
            offers.unflatten(-1, (self.slots, self.blueprints, len(self.offer))),
            critic,
        )

    def columns(self) -> Tensor:
        """(size,): for each number the index of its statistics, which all slots and all offers of a kind share."""
        host, slot, offer, critic = (len(names) for names in (self.host, self.slot, self.offer, self.critic))
        parts = [
            torch.arange(host),
            (host + torch.arange(slot)).repeat(self.slots),
            (host + slot + torch.arange(offer)).repeat(self.slots * self.blueprints),
            host + slot + offer + torch.arange(critic),
        ]
        return torch.cat(parts)

    @property
    def column_names(self) -> tuple[str, ...]:
        """A name per statistic."""
        return (
            *self.host,
            *(f"slot.{name}" for name in self.slot),
            *(f"offer.{name}" for name in self.offer),
            *(f"critic.{name}" for name in self.critic),
        )


def vector_layout(size: int) -> ObservationLayout:
    """The layout of an observation that is just a vector."""
    return ObservationLayout(host=tuple(f"x{index}" for index in range(size)))


LIMIT = 10.0
"""No column leaves ± this."""
BLUEPRINT = "blueprint"
"""Prefix of the columns that say what grows in a slot; the task's blueprints name them."""

V = TypeVar("V")
Columns = Mapping[str, Callable[[V], Tensor]]


def _bounded(value: Tensor) -> Tensor:
    """Shares and losses: of order 1 as they are."""
    return value.float().clamp(-LIMIT, LIMIT)


def _logged(value: Tensor) -> Tensor:
    """Counts and norms: from 0 up, over orders of magnitude."""
    return value.float().clamp(min=0.0).log1p().clamp(max=LIMIT)


def _points(value: Tensor) -> Tensor:
    """Differences of accuracies, in tens of points: all that are possible lie within the limit."""
    return _bounded(value.float() / 10)


def _accuracy(value: Tensor) -> Tensor:
    """A share."""
    return _bounded(value.float() / 100)


def _known(measured: Measured, value: Tensor) -> Tensor:
    """0 where it is not, whatever stands there."""
    return value.where(measured.valid, 0.0)


def _one_hot(prefix: str, names: Iterable[str], read: Callable[[V], Tensor]) -> dict[str, Callable[[V], Tensor]]:
    """A column for each value 0 … of what `read` gives; other values are none of them."""

    def equals(index: int) -> Callable[[V], Tensor]:
        return lambda view: read(view) == index

    return {f"{prefix}.{name}": equals(index) for index, name in enumerate(names)}


HOST: Columns[HostView] = {
    "time_left": lambda host: _bounded(host.time_left),
    "train_loss": lambda host: _logged(host.train_loss),
    "validation_loss": lambda host: _logged(host.validation_loss),
    "loss_gap": lambda host: _bounded(host.validation_loss - host.train_loss),
    "accuracy": lambda host: _accuracy(host.accuracy),
    "accuracy_change": lambda host: _points(host.accuracy_change),
    "best_accuracy": lambda host: _accuracy(host.best_accuracy),
    "below_best": lambda host: _points(host.best_accuracy - host.accuracy),
    "stale": lambda host: _bounded(host.stale),
    "grown": lambda host: _logged(host.grown),
    "budget_left": lambda host: _bounded(host.budget_left),
    **_one_hot("last_op", [op.name.lower() for op in LifecycleOp], lambda host: host.last_op),
    "last_succeeded": lambda host: host.last_succeeded,
}

# A seed that was germinated trains before anyone looks again: that stage is never seen.
_STAGES: dict[str, Callable[[SlotView], Tensor]] = _one_hot(
    "stage", [stage.name.lower() for stage in SeedStage], lambda slot: slot.stage
)
del _STAGES["stage.germinated"]

SLOT: Columns[SlotView] = {
    "width": lambda slot: _logged(slot.width),
    "depth": lambda slot: _bounded(slot.depth),
    "rms": lambda slot: _logged(slot.rms),
    "rank": lambda slot: _bounded(slot.rank),
    "gradient": lambda slot: _bounded(slot.gradient),
    **_STAGES,
    "alpha": lambda slot: _bounded(slot.alpha),
    "alpha_target": lambda slot: _bounded(slot.alpha_target),
    "ramping": lambda slot: slot.ramping,
    "steps_in_stage": lambda slot: _logged(slot.steps_in_stage),
    "age": lambda slot: _logged(slot.age),
    "cooldown": lambda slot: _logged(slot.cooldown),
    "can_advance": lambda slot: slot.can_advance,
    "can_fossilize": lambda slot: slot.can_fossilize,
    "can_prune": lambda slot: slot.can_prune,
    "can_retarget": lambda slot: slot.can_retarget,
    "audition": lambda slot: _known(slot.audition, _points(slot.audition.value)),
    "audition_error": lambda slot: _known(slot.audition, _points(slot.audition.error)),
    "audition_loss": lambda slot: _known(slot.audition, _bounded(slot.audition_loss)),
    "audition_valid": lambda slot: slot.audition.valid,
    "contribution": lambda slot: _known(slot.contribution, _points(slot.contribution.value)),
    "contribution_error": lambda slot: _known(slot.contribution, _points(slot.contribution.error)),
    "contribution_loss": lambda slot: _known(slot.contribution, _bounded(slot.contribution_loss)),
    "contribution_valid": lambda slot: slot.contribution.valid,
    "seed_gradient": lambda slot: _known(slot.seed_gradient, _logged(slot.seed_gradient.value)),
    "seed_gradient_valid": lambda slot: slot.seed_gradient.valid,
    "tried": lambda slot: _logged(slot.tried),
    "best": lambda slot: _known(slot.best, _points(slot.best.value)),
    "best_valid": lambda slot: slot.best.valid,
}
"""For any task; its blueprints add theirs."""

OFFER: Columns[OfferView] = {
    # Of what does not fit nothing is said: the best of a slot's offers should be one that can be taken.
    "worth": lambda offer: _bounded(offer.worth).where(offer.fits, 0.0),
    "cost": lambda offer: _logged(offer.cost).where(offer.fits, 0.0),
    "fits": lambda offer: offer.fits,
}

CRITIC: Columns[CriticView] = {
    "potential": lambda critic: _points(critic.potential),
    "control_accuracy": lambda critic: _accuracy(critic.control_accuracy),
    "control_change": lambda critic: _points(critic.control_change),
    "control_end": lambda critic: _accuracy(critic.control_end),
}
"""The only place where the control shows."""

SENSED = frozenset({"rms", "rank", "gradient", "worth"})
"""Columns of slots and offers that need a probe of the host's activations and gradients."""


def growth_layout(slots: SlotConfig, *, sensing: bool = True) -> ObservationLayout:
    """The columns for a task's slots; without `sensing` there are none that need a probe."""

    def seen(columns: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in columns if sensing or name not in SENSED)

    names = slots.blueprint_names
    blueprints = _one_hot(BLUEPRINT, names, _blueprint)
    return ObservationLayout(
        tuple(HOST), (*seen(SLOT), *blueprints), seen(OFFER), tuple(CRITIC), len(slots), len(names)
    )


def signals_to_features(signals: TrainingSignals, layout: ObservationLayout) -> Tensor:
    """(N, layout.size) float32, for a layout of `growth_layout`; no env's row depends on another's."""
    shape, wanted = tuple(signals.offers.fits.shape[1:]), (layout.slots, layout.blueprints)
    if shape != wanted:
        raise BadValueError(f"signals of (slots, blueprints) {shape} for a layout of {wanted}")
    prefix = f"{BLUEPRINT}."
    names = [name.removeprefix(prefix) for name in layout.slot if name.startswith(prefix)]
    parts = (
        _evaluate(HOST, layout.host, signals.hosts),
        _evaluate({**SLOT, **_one_hot(BLUEPRINT, names, _blueprint)}, layout.slot, signals.slots),
        _evaluate(OFFER, layout.offer, signals.offers),
        _evaluate(CRITIC, layout.critic, signals.critic),
    )
    return torch.cat([part.flatten(1) for part in parts], -1)


def fill_in_control_end(features: Tensor, layout: ObservationLayout, control_end: Tensor) -> Tensor:
    """Features (steps, N, size) of episodes that are over, with what their controls (N,) came to.

    No action reaches a control, so its whole life may be known to the baseline that advantages are measured from: they
    stay unbiased, and lose noise that is the host's and not the decision's. On `digits_blind`, what a plan gains varies
    by 18.6 (squared points) among hosts with equal first accuracies, and by 11.2 where the control's end is known too.
    """
    told = features.clone()
    told[..., layout.size - len(layout.critic) + layout.critic.index("control_end")] = _accuracy(control_end)
    return told


def _blueprint(slot: SlotView) -> Tensor:
    return slot.blueprint


def _evaluate(columns: Columns[V], names: tuple[str, ...], view: V) -> Tensor:
    """(…, names)"""
    if unknown := [name for name in names if name not in columns]:
        raise UnknownNameError("column", unknown[0], columns)
    return torch.stack([columns[name](view).float() for name in names], -1)
