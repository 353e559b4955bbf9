"""The layout of observations, and how signals become features."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SeedStage, SlotConfig
from esper.leyline.numbers import require_known, require_whole
from esper.tamiyo.signals import CriticView, HostView, OfferView, SlotView, TrainingSignals


@dataclass(frozen=True)
class ObservationLayout:
    """Column names, and the number of slots and blueprints. A plain vector has only host columns."""

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

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views into flat observations (…, size): the columns of the host (…, columns), of slots (…, S, columns), of
        offers (…, S, B, columns), and of the critic (…, columns). The actor does not see the last."""
        host, slots, offers, critic = flat.split(self.sizes, -1)
        slots = slots.unflatten(-1, (self.slots, len(self.slot)))
        return host, slots, offers.unflatten(-1, (self.slots, self.blueprints, len(self.offer))), critic

    def presence(self, slots: Tensor) -> Tensor:
        """(…, S) bool: which slots (…, S, columns) the host has; the others are padding."""
        if PRESENT not in self.slot:
            return torch.ones(slots.shape[:-1], dtype=torch.bool, device=slots.device)
        return slots[..., self.slot.index(PRESENT)] > 0

    def counted(self, flat: Tensor) -> Tensor:
        """(…, size) bool: numbers of observations (…, size) that are no padding."""
        host, slots, offers, critic = self.split(flat)
        present = self.presence(slots)[..., None]
        parts = (torch.ones_like(host), present.expand(slots.shape), present[..., None].expand(offers.shape))
        every = [*(part.flatten(host.dim() - 1) for part in parts), torch.ones_like(critic)]
        return torch.cat([part.bool() for part in every], -1)

    def as_they_are(self) -> Tensor:
        """(size,) bool: numbers that are not normalised, because they are bits that the network reads."""
        names = [name == f"slot.{PRESENT}" for name in self.column_names]
        return torch.tensor(names)[self.columns()]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The blueprints that a policy with this layout knows."""
        prefix = f"{BLUEPRINT}."
        return tuple(name.removeprefix(prefix) for name in self.slot if name.startswith(prefix))

    def columns(self) -> Tensor:
        """(size,): for each number the index of its statistics. Slots share theirs, and so do offers."""
        names = (self.host, self.slot, self.offer, self.critic)
        repeats = (1, self.slots, self.slots * self.blueprints, 1)
        parts = torch.arange(len(self.column_names)).split([len(part) for part in names])
        return torch.cat([part.repeat(times) for part, times in zip(parts, repeats, strict=True)])

    @property
    def column_names(self) -> tuple[str, ...]:
        """A name per statistic."""
        return (
            *self.host,
            *(f"slot.{name}" for name in self.slot),
            *(f"offer.{name}" for name in self.offer),
            *(f"critic.{name}" for name in self.critic),
        )


PRESENT = "present"
"""The slot column that is 0 for padding, where hosts of several tasks differ in their number of slots"""
BLUEPRINT = "blueprint"
"""Prefix of the columns that say what grows in a slot. The blueprints that a policy knows name them."""


def vector_layout(size: int) -> ObservationLayout:
    """The layout of an observation that is a plain vector."""
    return ObservationLayout(host=tuple(f"x{index}" for index in range(size)))


LIMIT = 10.0  # columns lie within ± this

V = TypeVar("V")
Columns = Mapping[str, Callable[[V], Tensor]]
Scale = Callable[[Tensor], Tensor]


def _bounded(value: Tensor) -> Tensor:
    """Shares and losses, which are of order 1."""
    return value.float().clamp(-LIMIT, LIMIT)


def _logged(value: Tensor) -> Tensor:
    """Counts and norms, which span orders of magnitude."""
    return value.float().clamp(min=0.0).log1p().clamp(max=LIMIT)


def _points(value: Tensor) -> Tensor:
    """Differences of accuracies, in tens of points: all possible ones lie within the limit."""
    return _bounded(value.float() / 10)


def _accuracy(value: Tensor) -> Tensor:
    """Percent as a share."""
    return _bounded(value.float() / 100)


def _one_hot(prefix: str, names: Iterable[str], read: Callable[[V], Tensor]) -> dict[str, Callable[[V], Tensor]]:
    """A column per value 0 … of `read`; other values set none of them."""

    def equals(index: int) -> Callable[[V], Tensor]:
        return lambda view: read(view) == index

    return {f"{prefix}.{name}": equals(index) for index, name in enumerate(names)}


class SlotColumn(NamedTuple):
    """A column of `SlotView`: how it is stored, where it comes from, and how it becomes a feature."""

    name: str
    scale: Scale | None = None  # None: a flag, which is its own feature, or an index, which becomes one-hot
    dtype: torch.dtype = torch.float32
    seed: str | None = None  # the attribute of a seed's state that holds it, if one does
    valid: str | None = None  # the column that says where it was measured; the feature is 0 elsewhere

    def feature(self, view: SlotView) -> Tensor:
        """(N, S), of any dtype."""
        value = view.column(self.name)
        scaled = value if self.scale is None else self.scale(value)
        return scaled if self.valid is None else scaled.where(view.column(self.valid), 0.0)


SLOT_COLUMNS: tuple[SlotColumn, ...] = (
    SlotColumn(PRESENT, dtype=torch.bool),
    SlotColumn("width", _logged),
    SlotColumn("depth", _bounded),
    SlotColumn("rms", _logged),
    SlotColumn("rank", _bounded),
    SlotColumn("gradient", _bounded),
    SlotColumn("stage", dtype=torch.long, seed="stage"),
    SlotColumn("alpha", _bounded, seed="alpha"),
    SlotColumn("alpha_target", _bounded, seed="controller.target"),
    SlotColumn("ramping", dtype=torch.bool, seed="ramping"),
    SlotColumn("steps_in_stage", _logged, seed="steps_in_stage"),
    SlotColumn("age", _logged, seed="age"),
    SlotColumn("cooldown", _logged, seed="cooldown"),
    SlotColumn("can_advance", dtype=torch.bool),
    SlotColumn("can_fossilize", dtype=torch.bool),
    SlotColumn("can_prune", dtype=torch.bool),
    SlotColumn("can_retarget", dtype=torch.bool),
    SlotColumn("audition", _points, valid="audition_valid"),
    SlotColumn("audition_error", _points, valid="audition_valid"),
    SlotColumn("audition_loss", _bounded, valid="audition_valid"),
    SlotColumn("audition_valid", dtype=torch.bool),
    SlotColumn("contribution", _points, valid="contribution_valid"),
    SlotColumn("contribution_error", _points, valid="contribution_valid"),
    SlotColumn("contribution_loss", _bounded, valid="contribution_valid"),
    SlotColumn("contribution_valid", dtype=torch.bool),
    SlotColumn("seed_gradient", _logged, valid="seed_gradient_valid"),
    SlotColumn("seed_gradient_valid", dtype=torch.bool),
    SlotColumn("tried", _logged, seed="germinations"),
    SlotColumn("best", _points, valid="best_valid"),
    SlotColumn("best_valid", dtype=torch.bool),
    SlotColumn(BLUEPRINT, dtype=torch.long),
)
"""The columns of `SlotView` in the order of their features."""


def _slot_features(blueprints: Iterable[str]) -> dict[str, Callable[[SlotView], Tensor]]:
    """The features of a slot for a task's blueprints; indices become one-hot."""
    names = {"stage": [stage.name.lower() for stage in SeedStage], BLUEPRINT: blueprints}
    features: dict[str, Callable[[SlotView], Tensor]] = {}
    for column in SLOT_COLUMNS:
        if column.name in names:
            features |= _one_hot(column.name, names[column.name], column.feature)
        else:
            features[column.name] = column.feature
    del features["stage.germinated"]  # such a seed trains before the next observation, so this stage is never seen
    return features


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

OFFER: Columns[OfferView] = {
    # 0 where a blueprint does not fit: the best of a slot's offers should be one that can be taken.
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
"""The only columns that show the control."""

SENSED = frozenset({"rms", "rank", "gradient", "worth"})
"""Columns of slots and offers that need a probe of the host's activations and gradients."""


def growth_layout(
    slots: SlotConfig, *, sensing: bool = True, vocabulary: tuple[str, ...] | None = None
) -> ObservationLayout:
    """The columns for a task's slots and blueprints, or another `vocabulary` of blueprints.

    Without `sensing`, only the columns that need no probe.
    """

    def visible(columns: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in columns if sensing or name not in SENSED)

    names = slots.blueprint_names if vocabulary is None else vocabulary
    return ObservationLayout(
        tuple(HOST), visible(_slot_features(names)), visible(OFFER), tuple(CRITIC), len(slots), len(names)
    )


def signals_to_features(signals: TrainingSignals, layout: ObservationLayout) -> Tensor:
    """(N, layout.size) float32, for a layout of `growth_layout`. Rows are independent of each other."""
    shape, wanted = tuple(signals.offers.fits.shape[1:]), (layout.slots, layout.blueprints)
    if shape != wanted:
        raise BadValueError(f"signals have (slots, blueprints) {shape}, the layout has {wanted}")
    parts = (
        _evaluate(HOST, layout.host, signals.hosts),
        _evaluate(_slot_features(layout.vocabulary), layout.slot, signals.slots),
        _evaluate(OFFER, layout.offer, signals.offers),
        _evaluate(CRITIC, layout.critic, signals.critic),
    )
    return torch.cat([part.flatten(1) for part in parts], -1)


def fill_in_control_end(features: Tensor, layout: ObservationLayout, control_end: Tensor) -> Tensor:
    """Features (steps, N, size) of finished episodes, with the final accuracies (N,) of their controls.

    No action affects a control, so the baseline of the advantages may know all of its episode. Advantages stay
    unbiased and lose noise that comes from the host. On `digits_blind`, the gain of a plan varies by 18.6 (squared
    points) among hosts with equal first accuracies, and by 11.2 if the control's end is known too.
    """
    return _fill_in(features, layout, "control_end", _accuracy(control_end))


def fill_in_potential(features: Tensor, layout: ObservationLayout, potential: Tensor) -> Tensor:
    """Features (…, size) with these potentials (…), in points; where nothing pays a reward, Φ is not known."""
    return _fill_in(features, layout, "potential", _points(potential))


def _fill_in(features: Tensor, layout: ObservationLayout, name: str, values: Tensor) -> Tensor:
    """Features with another column of the critic."""
    filled = features.clone()
    filled[..., layout.size - len(layout.critic) + layout.critic.index(name)] = values
    return filled


def _evaluate(columns: Columns[V], names: tuple[str, ...], view: V) -> Tensor:
    """(…, names)"""
    for name in names:
        require_known("column", name, columns)
    return torch.stack([columns[name](view).float() for name in names], -1)
