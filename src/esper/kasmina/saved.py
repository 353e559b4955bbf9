"""What a checkpoint says of a model beside its tensors, and what must hold for it to be believed."""

import math
from dataclasses import dataclass

import torch

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.host import Host
from esper.kasmina.lifecycle import MEASUREMENTS_KEPT, LifecycleConfig, SeedState
from esper.kasmina.slot import Isolation
from esper.leyline import (
    ACTIVE_STAGES,
    BLEND_STYLES,
    LIVE_STAGES,
    CheckpointError,
    SeedStage,
    SlotSpec,
    UnknownNameError,
)
from esper.leyline.records import Json
from esper.leyline.stored import refusal

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class SavedHost:
    """Which host it is, and how to build it where that is possible from its configuration alone."""

    class_name: str
    kind: str | None
    """Name in `Host.KINDS`, or None for a host that only its user can build."""
    config: dict[str, Json] | None


@dataclass(frozen=True)
class SavedSlot:
    """One slot: what passes there (None while an attached host has not run yet), and its seed."""

    spec: SlotSpec | None
    state: SeedState


@dataclass(frozen=True)
class SavedModel:
    """Everything but the tensors. The fields are the keys of the JSON."""

    host: SavedHost
    dtype: str
    isolation: Isolation
    config: LifecycleConfig
    budget: int | None
    rng_seed: int
    slots: tuple[SavedSlot, ...]
    frozen: tuple[str, ...]
    """Parameters that do not train."""

    @property
    def slot_ids(self) -> tuple[str, ...]:
        """Ids in the host's order."""
        return tuple(saved.state.slot_id for saved in self.slots)


def check_model(model: SavedModel, where: str) -> None:
    """What the types do not tell."""
    with refusal(where):
        if model.dtype not in DTYPES:
            raise UnknownNameError("dtype", model.dtype, DTYPES)
        if model.host.kind is not None and model.host.kind not in Host.KINDS:
            raise UnknownNameError("host kind", model.host.kind, Host.KINDS)
    if (model.host.kind is None) != (model.host.config is None):
        raise CheckpointError(
            f"{where}: host kind {model.host.kind!r} with config {model.host.config}; both or neither"
        )
    if len(set(model.slot_ids)) != len(model.slots):
        raise CheckpointError(f"{where}: slot ids must be unique, got {list(model.slot_ids)}")
    for saved in model.slots:
        check_state(saved.spec, saved.state, f"{where}: slot {saved.state.slot_id!r}")


def check_state(spec: SlotSpec | None, state: SeedState, where: str) -> None:
    """That the verbs of the lifecycle can have led to this state, and that its seed can be built."""
    for problem, holds in _life_conditions(state).items():
        if not holds:
            raise CheckpointError(f"{where}: {problem}")
    if spec is not None and spec.slot_id != state.slot_id:
        raise CheckpointError(f"{where}: its spec is that of slot {spec.slot_id!r}")
    if state.blueprint is not None:
        if spec is None:
            raise CheckpointError(f"{where}: a {state.blueprint!r} seed where nothing is known of what passes")
        with refusal(where):
            misfit = BlueprintRegistry.spec(spec.topology, state.blueprint).misfit(spec.width, spec.resolution)
        if misfit is not None:
            raise CheckpointError(f"{where}: blueprint {state.blueprint!r} does not fit: {misfit}")


def _life_conditions(state: SeedState) -> dict[str, bool]:
    """What is wrong with a state, unless true."""
    stage, ramp = state.stage, state.controller
    live, blends = stage in LIVE_STAGES, stage is SeedStage.BLENDING
    # PRUNED lasts from the full timer of at least 3, RESETTING is its last tick.
    rest = {SeedStage.PRUNED: (3, math.inf), SeedStage.EMBARGOED: (2, math.inf), SeedStage.RESETTING: (1, 1)}
    least, most = rest.get(stage, (0, 0))
    goal = 0.0 if state.pruning or stage not in ACTIVE_STAGES else state.alpha_target
    low, high = sorted((ramp.start, ramp.target))
    counters = (state.tempo, state.steps_in_stage, state.age, state.germinations)
    return {
        f"blueprint {state.blueprint!r} in {stage.name}; just the live stages have one": live == bool(state.blueprint),
        f"style {state.style!r} is none of {BLEND_STYLES}": state.style in BLEND_STYLES,
        f"tempo, steps, age and germinations {counters} must be 0 or more": min(counters) >= 0,
        f"{state.germinations} germinations, but a seed in {stage.name}": state.germinations > 0 or not live,
        f"cooldown {state.cooldown} in {stage.name}; allowed: {least} to {most}": least <= state.cooldown <= most,
        f"alpha_target {state.alpha_target} is not in (0, 1]": 0.0 < state.alpha_target <= 1.0,
        f"alpha goes to {ramp.target} in {stage.name}; it must go to {goal}": ramp.target == goal,
        f"alpha {ramp.alpha} is not between {ramp.start} and {ramp.target}": low <= ramp.alpha <= high,
        f"alpha {ramp.alpha} holds beside its target {ramp.target}": state.ramping or ramp.alpha == ramp.target,
        f"a ramp in {stage.name}; only BLENDING seeds have one": blends or not (state.ramping or state.pruning),
        f"more than {MEASUREMENTS_KEPT} measurements": max(len(state.auditions), len(state.contributions))
        <= MEASUREMENTS_KEPT,
    }
