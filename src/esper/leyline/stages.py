"""The life of a seed.

    DORMANT → GERMINATED → TRAINING → BLENDING ⇄ HOLDING → FOSSILIZED
                  └────────────┴──────────┴─────────┘
                                  ↓
                  PRUNED → EMBARGOED → RESETTING → DORMANT

One table says which steps exist; whether a step may be taken now is a gate's business (`esper.kasmina.gates`).
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class SeedStage(IntEnum):
    """Where a slot stands; values are dense, so they index tensors directly."""

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    HOLDING = 4
    FOSSILIZED = 5
    PRUNED = 6
    EMBARGOED = 7
    RESETTING = 8


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
if missing := set(SeedStage) - set(TRANSITIONS):
    raise RuntimeError(f"the transition table lacks {sorted(stage.name for stage in missing)}")

LIVE_STAGES = frozenset(
    {SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED}
)
"""A seed module exists."""
ACTIVE_STAGES = frozenset({SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED})
"""The seed acts on the main row."""
COOLDOWN_STAGES = frozenset({SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING})
"""The slot rests after a prune."""


def can_transition(source: SeedStage, target: SeedStage) -> bool:
    """Whether the table has the step from `source` to `target`."""
    return target in TRANSITIONS[source]
