"""What crosses the borders between subsystems: stages, ops and action heads, slots, signals, outcomes, errors."""

from esper.leyline.actions import (
    ALPHA_CURVES,
    BLEND_STYLES,
    HEAD_NAMES,
    HEAD_PRESETS,
    HEADS,
    RELEVANCE,
    Head,
    HeadPreset,
    LifecycleOp,
    head_preset,
    relevance,
)
from esper.leyline.errors import (
    BadValueError,
    BlueprintContractError,
    CheckpointError,
    DataError,
    EsperError,
    FleetMemoryError,
    GateRefusedError,
    HostMismatchError,
    MissingPackageError,
    SlotOccupiedError,
    StageError,
    StorageError,
    UnknownNameError,
)
from esper.leyline.outcomes import EpisodeOutcome, GateResult, Measurement, StageChange, mean_of
from esper.leyline.randomness import derive_seed
from esper.leyline.signals import HostSignals, SeedReport
from esper.leyline.slots import TOPOLOGIES, BlueprintOffer, SlotConfig, SlotSpec, Topology, slot_id
from esper.leyline.stages import (
    ACTIVE_STAGES,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    TRANSITIONS,
    SeedStage,
    can_transition,
)

DEFAULT_GAMMA = 1.0
"""Discount of rewards and of their shaping alike: with 1 the shaped reward sums to the objective itself."""

__all__ = [
    "ACTIVE_STAGES",
    "ALPHA_CURVES",
    "BLEND_STYLES",
    "COOLDOWN_STAGES",
    "DEFAULT_GAMMA",
    "HEADS",
    "HEAD_NAMES",
    "HEAD_PRESETS",
    "LIVE_STAGES",
    "RELEVANCE",
    "TOPOLOGIES",
    "TRANSITIONS",
    "BadValueError",
    "BlueprintContractError",
    "BlueprintOffer",
    "CheckpointError",
    "DataError",
    "EpisodeOutcome",
    "EsperError",
    "FleetMemoryError",
    "GateRefusedError",
    "GateResult",
    "Head",
    "HeadPreset",
    "HostMismatchError",
    "HostSignals",
    "LifecycleOp",
    "Measurement",
    "MissingPackageError",
    "SeedReport",
    "SeedStage",
    "SlotConfig",
    "SlotOccupiedError",
    "SlotSpec",
    "StageChange",
    "StageError",
    "StorageError",
    "Topology",
    "UnknownNameError",
    "can_transition",
    "derive_seed",
    "head_preset",
    "mean_of",
    "relevance",
    "slot_id",
]
