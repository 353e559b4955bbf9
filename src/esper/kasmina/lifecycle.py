"""The life of one seed: the state of a slot, and every verb that changes it.

States are immutable and verbs are pure, so a refused verb changes nothing and a snapshot is a reference. A single model
and a fleet use the same functions. `slot.py` holds the modules, `gates.py` the conditions.

A step trains first and ticks last. ADVANCE into BLENDING sets the first non-zero alpha at once, so a ramp of three
trains at ⅓, ⅔ and 1. Only `tick` moves counters and timers and makes automatic transitions.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

from esper.kasmina.blending import AlphaController, gate_parameters
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.gates import GATES, GateThresholds, gate_germinate
from esper.leyline import (
    ALPHA_CURVES,
    BLEND_STYLES,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    BadValueError,
    GateRefusedError,
    Measurement,
    SeedReport,
    SeedStage,
    SlotOccupiedError,
    SlotSpec,
    StageChange,
    StageError,
    can_transition,
    mean_of,
)
from esper.leyline.numbers import require_known, require_share, require_whole

MEASUREMENTS_KEPT = 2  # gates and features use the mean of these


@dataclass(frozen=True)
class LifecycleConfig:
    """Timers and thresholds of the lifecycle."""

    cooldown: int = 3
    """Ticks from a prune until the slot is free again."""
    min_prune_age: int = 2
    """Steps in TRAINING before a seed may be pruned."""
    thresholds: GateThresholds = field(default_factory=GateThresholds)
    act_from_birth: bool = False
    """A seed acts in the main row at once, at its full alpha: its scale is zero, so nothing jumps."""

    def __post_init__(self) -> None:
        require_whole("cooldown", self.cooldown, 3, remark=": PRUNED, EMBARGOED and RESETTING take a tick each")
        require_whole("min_prune_age", self.min_prune_age, 0)
        if not isinstance(self.thresholds, GateThresholds):
            raise BadValueError(f"thresholds are a {type(self.thresholds).__name__}; pass GateThresholds")
        if not isinstance(self.act_from_birth, bool):
            raise BadValueError(f"act_from_birth {self.act_from_birth!r} is not True or False")


@dataclass(frozen=True)
class SeedState:
    """One slot: its stage, and the seed in it if there is one."""

    slot_id: str
    stage: SeedStage = SeedStage.DORMANT
    blueprint: str | None = None
    style: str = "add"
    tempo: int = 3
    alpha_target: float = 1.0
    controller: AlphaController = field(default_factory=AlphaController)
    pruning: bool = False  # alpha is on a ramp to 0, after which the seed is removed
    steps_in_stage: int = 0
    age: int = 0
    cooldown: int = 0
    germinations: int = 0
    gradient_norm: float | None = None
    auditions: tuple[Measurement, ...] = ()
    contributions: tuple[Measurement, ...] = ()

    @property
    def alpha(self) -> float:
        """Strength of the seed in the main row."""
        return self.controller.alpha

    @property
    def audition(self) -> Measurement | None:
        """Mean of the last two auditions."""
        return mean_of(self.auditions)

    @property
    def contribution(self) -> Measurement | None:
        """Mean of the last two contributions."""
        return mean_of(self.contributions)

    @property
    def ramping(self) -> bool:
        """Whether alpha is on a ramp; no op may address the slot then."""
        return not self.controller.holding


def germinate(
    state: SeedState,
    slot: SlotSpec,
    blueprint: str,
    *,
    style: str = "add",
    tempo: int = 3,
    alpha_target: float = 1.0,
    budget_left: int | None = None,
) -> SeedState:
    """Put a new seed into a dormant slot, if the blueprint fits it and the budget (None: unlimited)."""
    spec = BlueprintRegistry.spec(slot.topology, blueprint)
    require_known("blending style", style, BLEND_STYLES)
    require_whole("tempo", tempo, 0, remark="; it is the number of steps of the first ramp")
    require_share("alpha_target", alpha_target)
    if state.stage is not SeedStage.DORMANT:
        alive = state.stage in LIVE_STAGES
        holder = f"holds a {state.blueprint!r} seed" if alive else f"rests for {state.cooldown} more ticks"
        raise SlotOccupiedError(f"slot {state.slot_id!r} {holder} ({state.stage.name}); germinate in a DORMANT one")
    verdict = gate_germinate(state.stage, spec, slot, style, budget_left)
    if not verdict.passed:
        raise GateRefusedError(f"slot {slot.slot_id!r} may not germinate {blueprint!r}: " + "; ".join(verdict.reasons))
    number, stage = state.germinations + 1, SeedStage.GERMINATED
    return SeedState(state.slot_id, stage, blueprint, style, tempo, alpha_target, germinations=number)


def act_at_once(state: SeedState) -> SeedState:
    """Let a newborn act in the main row at its full alpha."""
    acting = enter(enter(state, SeedStage.TRAINING), SeedStage.BLENDING)
    return replace(acting, controller=state.controller.retarget(state.alpha_target, 0))


def advance(state: SeedState, config: LifecycleConfig) -> SeedState:
    """Move to the next stage, if its gate passes."""
    target = dict(pairwise([SeedStage.GERMINATED, *GATES])).get(state.stage)
    if target is None:
        resting = f"the slot rests; {state.cooldown} ticks are left"
        remedies = {SeedStage.DORMANT: "germinate a seed first", SeedStage.FOSSILIZED: "a fossil is permanent"}
        remedy = remedies.get(state.stage, resting)
        raise StageError(f"slot {state.slot_id!r} cannot advance from {state.stage.name}: {remedy}")
    if state.pruning:
        raise StageError(f"slot {state.slot_id!r} is being pruned; it cannot advance")
    verdict = GATES[target](state, config.thresholds)
    if not verdict.passed:
        reasons = "; ".join(verdict.reasons)
        raise GateRefusedError(
            f"slot {state.slot_id!r} may not go from {state.stage.name} to {target.name} yet: {reasons}"
        )
    moved = enter(state, target)
    if target is SeedStage.BLENDING:
        # The first non-zero alpha acts in the next training.
        return replace(moved, controller=state.controller.retarget(state.alpha_target, state.tempo).step())
    return moved


def enter(state: SeedState, target: SeedStage) -> SeedState:
    """Make a transition of the table; restarts the stage's counter."""
    if not can_transition(state.stage, target):
        raise StageError(f"slot {state.slot_id!r}: there is no step from {state.stage.name} to {target.name}")
    entered = replace(state, stage=target, steps_in_stage=0)
    # G5 judges a seed at the alpha that it holds, so contributions measured during the ramp do not count.
    return replace(entered, contributions=()) if target is SeedStage.HOLDING else entered


def fossilize(state: SeedState, config: LifecycleConfig) -> SeedState:
    """Commit a held seed for good."""
    if state.stage is not SeedStage.HOLDING:
        raise StageError(f"slot {state.slot_id!r} cannot fossilise from {state.stage.name}; only a HOLDING seed can")
    return advance(state, config)


def set_alpha_target(state: SeedState, target: float, steps: int, curve: str = "linear") -> SeedState:
    """Send a HOLDING seed to another alpha; it is BLENDING during the ramp."""
    if state.stage is not SeedStage.HOLDING:
        raise StageError(f"slot {state.slot_id!r} has no alpha to set in {state.stage.name}; only a HOLDING seed has")
    require_share("alpha target", target, remark="; to silence a seed, prune it")
    require_whole("steps", steps, 0, remark="; it is the length of the ramp")
    controller = state.controller.retarget(target, steps, curve).step()
    blending = enter(state, SeedStage.BLENDING)
    return replace(blending, alpha_target=target, controller=controller, contributions=())


def prune(state: SeedState, config: LifecycleConfig, *, steps: int = 0, curve: str = "linear") -> SeedState:
    """Remove the seed: at once, or after a ramp to 0 during which no op may address it."""
    if state.stage not in LIVE_STAGES or state.stage is SeedStage.FOSSILIZED:
        why = "a fossil is permanent" if state.stage is SeedStage.FOSSILIZED else "there is no seed in it"
        raise StageError(f"slot {state.slot_id!r} cannot be pruned in {state.stage.name}: {why}")
    require_whole("steps", steps, 0, remark="; it is the length of the ramp, 0 to cut at once")
    require_known("alpha curve", curve, ALPHA_CURVES)
    age, least = state.steps_in_stage, config.min_prune_age
    if state.stage is SeedStage.TRAINING and age < least:
        raise GateRefusedError(f"slot {state.slot_id!r} has trained for {age} steps; it may be pruned after {least}")
    if state.ramping:
        raise StageError(f"slot {state.slot_id!r} is on a ramp; it can be pruned when alpha holds")
    if steps == 0 or state.alpha == 0.0:
        return cut(state, config)
    blending = state if state.stage is SeedStage.BLENDING else enter(state, SeedStage.BLENDING)
    controller = state.controller.retarget(0.0, steps, curve).step()
    begun = replace(blending, pruning=True, controller=controller, contributions=())
    return begun if begun.alpha > 0.0 else cut(begun, config)


def cut(state: SeedState, config: LifecycleConfig) -> SeedState:
    """Remove the seed and start the cooldown."""
    enter(state, SeedStage.PRUNED)
    return SeedState(state.slot_id, SeedStage.PRUNED, cooldown=config.cooldown, germinations=state.germinations)


def tick(state: SeedState, config: LifecycleConfig) -> tuple[SeedState, tuple[StageChange, ...]]:
    """End a step: move counters, ramps and timers, and make automatic transitions."""
    before = state.stage
    if state.stage in COOLDOWN_STAGES:
        # PRUNED and RESETTING last one tick each, EMBARGOED the rest of the timer.
        left = state.cooldown - 1
        stage = {0: SeedStage.DORMANT, 1: SeedStage.RESETTING}.get(left, SeedStage.EMBARGOED)
        steps = state.steps_in_stage + 1 if stage is before else 0
        state = replace(state, stage=stage, cooldown=left, steps_in_stage=steps)
    elif state.stage in LIVE_STAGES:
        state = replace(state, steps_in_stage=state.steps_in_stage + 1, age=state.age + 1)
        if state.stage is SeedStage.GERMINATED:
            state = enter(state, SeedStage.TRAINING)
        elif state.stage is SeedStage.BLENDING and state.controller.holding:
            state = enter(state, SeedStage.HOLDING)  # it has trained at its target
        elif state.stage is SeedStage.BLENDING:
            state = replace(state, controller=state.controller.step())
            state = cut(state, config) if state.pruning and state.alpha == 0.0 else state
    return state, () if state.stage is before else (StageChange(state.slot_id, before, state.stage, "tick"),)


def record_gradient(state: SeedState, norm: float) -> SeedState:
    """Record the norm of the seed's last gradient."""
    return replace(state, gradient_norm=norm if math.isfinite(norm) else math.inf)


def record_audition(state: SeedState, measured: Measurement) -> SeedState:
    """Record the shadow row's advantage over the main row."""
    return replace(state, auditions=(*state.auditions, measured)[-MEASUREMENTS_KEPT:])


def record_contribution(state: SeedState, measured: Measurement) -> SeedState:
    """Record the main row's advantage over the row without this seed."""
    return replace(state, contributions=(*state.contributions, measured)[-MEASUREMENTS_KEPT:])


def seed_parameters(slot: SlotSpec, state: SeedState) -> int:
    """Parameters of the seed and its gate; 0 in an empty slot."""
    if state.blueprint is None:
        return 0
    spec = BlueprintRegistry.spec(slot.topology, state.blueprint)
    return spec.parameters_in(slot) + gate_parameters(state.style, slot.width)


def report(state: SeedState, parameters: int) -> SeedReport:
    """What a controller may know about a slot."""
    return SeedReport(
        slot_id=state.slot_id,
        stage=state.stage,
        blueprint=state.blueprint,
        style=state.style if state.blueprint is not None else None,
        alpha=state.alpha,
        alpha_target=state.controller.target,
        ramping=state.ramping,
        steps_in_stage=state.steps_in_stage,
        age=state.age,
        cooldown=state.cooldown,
        parameters=parameters,
        gradient_norm=state.gradient_norm,
        audition=state.audition,
        contribution=state.contribution,
        germinations=state.germinations,
    )
