"""How an observation lies in one flat vector: columns of the host, of each slot and offer, and the critic's own."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole


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
