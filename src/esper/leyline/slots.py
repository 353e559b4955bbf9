"""Slots of a host, and the stages in the life of the seed in a slot.

    DORMANT → GERMINATED → TRAINING → BLENDING ⇄ HOLDING → FOSSILIZED
                  └────────────┴──────────┴─────────┘
                                  ↓
                  PRUNED → EMBARGOED → RESETTING → DORMANT

One table lists the transitions; the gates decide whether one may happen now (`esper.kasmina.gates`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Literal, get_args

from esper.leyline.errors import BadValueError, UnknownNameError


class SeedStage(IntEnum):
    """The stage of a slot. Values are dense, so they index tensors."""

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    HOLDING = 4
    FOSSILIZED = 5
    PRUNED = 6
    EMBARGOED = 7
    RESETTING = 8

    @property
    def letter(self) -> str:
        """The first letter of its name; no two stages share one."""
        return self.name[0]


# The first entry is where `advance` leads.
TRANSITIONS: Mapping[SeedStage, tuple[SeedStage, ...]] = MappingProxyType(
    {
        SeedStage.DORMANT: (SeedStage.GERMINATED,),
        SeedStage.GERMINATED: (SeedStage.TRAINING, SeedStage.PRUNED),
        SeedStage.TRAINING: (SeedStage.BLENDING, SeedStage.PRUNED),
        SeedStage.BLENDING: (SeedStage.HOLDING, SeedStage.PRUNED),
        SeedStage.HOLDING: (SeedStage.FOSSILIZED, SeedStage.BLENDING, SeedStage.PRUNED),
        SeedStage.FOSSILIZED: (),
        SeedStage.PRUNED: (SeedStage.EMBARGOED,),
        SeedStage.EMBARGOED: (SeedStage.RESETTING,),
        SeedStage.RESETTING: (SeedStage.DORMANT,),
    }
)

ACTIVE_STAGES = frozenset({SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED})
"""The seed acts on the main row."""
LIVE_STAGES = ACTIVE_STAGES | {SeedStage.GERMINATED, SeedStage.TRAINING}  # a seed module exists
COOLDOWN_STAGES = frozenset({SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING})
"""The slot rests after a prune."""


def can_transition(source: SeedStage, target: SeedStage) -> bool:
    """Whether the table has the transition from `source` to `target`."""
    return target in TRANSITIONS[source]


Topology = Literal["image", "tokens", "vector"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)


def slot_id(row: int, column: int) -> str:
    """`r<row>c<column>`: the column is the block, row 0 lies before its pooling (if any), row 1 after it."""
    return f"r{row}c{column}"


@dataclass(frozen=True)
class BlueprintOffer:
    """A blueprint that fits a slot, with its number of parameters at the slot's width."""

    name: str
    min_width: int
    min_resolution: int
    parameters: int


@dataclass(frozen=True)
class SlotSpec:
    """One slot: the activation that passes it, and the blueprints that fit."""

    slot_id: str
    width: int
    topology: Topology
    position: float  # depth in the host: 0 at its input, 1 at its output
    resolution: int | None = None  # side of the image or length of the sequence; None if unknown
    blueprints: tuple[BlueprintOffer, ...] = ()

    def __post_init__(self) -> None:
        if self.width < 1:
            raise BadValueError(f"slot {self.slot_id!r}: width {self.width} is not positive")
        if self.topology not in TOPOLOGIES:
            raise UnknownNameError("topology", self.topology, TOPOLOGIES)
        if not 0.0 <= self.position <= 1.0:
            raise BadValueError(f"slot {self.slot_id!r}: position {self.position} is not in [0, 1]")


@dataclass(frozen=True)
class SlotConfig:
    """The slots of a task in order. Features, masks, heads and buffers are built from it."""

    slots: tuple[SlotSpec, ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise BadValueError("a slot configuration needs at least one slot")
        if len(set(self.slot_ids)) != len(self.slots):
            raise BadValueError(f"slot ids must be unique, got {list(self.slot_ids)}")

    @property
    def slot_ids(self) -> tuple[str, ...]:
        """Ids in the order of the slot head."""
        return tuple(slot.slot_id for slot in self.slots)

    @cached_property
    def blueprint_names(self) -> tuple[str, ...]:
        """The choices of the blueprint head: every offered name once, in order of first appearance."""
        return tuple(dict.fromkeys(offer.name for slot in self.slots for offer in slot.blueprints))

    def index(self, wanted: str) -> int:
        """Index of a slot id in the slot head."""
        if wanted not in self.slot_ids:
            raise UnknownNameError("slot", wanted, self.slot_ids)
        return self.slot_ids.index(wanted)

    def __getitem__(self, wanted: str) -> SlotSpec:
        return self.slots[self.index(wanted)]

    def __len__(self) -> int:
        return len(self.slots)
