"""The life of one seed as values: what a slot's state is, and every verb that changes it.

States are immutable and verbs are pure, so a refused verb has changed nothing, and a snapshot is a reference. The same
functions serve a single model and a fleet. Modules are the business of `slot.py`, conditions that of `gates.py`.

Time: a step trains first and ticks last. ADVANCE into BLENDING sets the first non-zero alpha at once, so a ramp of
three trains at ⅓, ⅔ and 1. `tick` is the only place where counters and timers move and where
transitions happen by themselves.
"""

import math
from dataclasses import dataclass, field, replace

from esper.kasmina.blending import AlphaController, gate_parameters
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.gates import GATE_OF_TARGET, GATES, GateThresholds, gate_germinate
from esper.leyline import (
    ALPHA_CURVES,
    BLEND_STYLES,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    BadValueError,
    GateRefusedError,
    GateResult,
    Measurement,
    SeedReport,
    SeedStage,
    SlotOccupiedError,
    SlotSpec,
    StageChange,
    StageError,
    UnknownNameError,
    can_transition,
    mean_of,
)
from esper.leyline.numbers import require_share, require_whole

MEASUREMENTS_KEPT = 2
"""Gates and features use the mean of the last two measurements."""


@dataclass(frozen=True)
class LifecycleConfig:
    """Timers and thresholds of the lifecycle."""

    cooldown: int = 3
    """Ticks from a prune until the slot is usable again."""
    min_prune_age: int = 2
    """Steps in TRAINING before a seed may be pruned."""
    thresholds: GateThresholds = field(default_factory=GateThresholds)

    def __post_init__(self) -> None:
        require_whole("cooldown", self.cooldown, 3, remark=": PRUNED, EMBARGOED and RESETTING take a tick each")
        require_whole("min_prune_age", self.min_prune_age, 0)
        if not isinstance(self.thresholds, GateThresholds):
            raise BadValueError(f"thresholds are a {type(self.thresholds).__name__}; pass GateThresholds")


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
    pruning: bool = False
    """A ramp towards 0 at whose end the seed is cut."""
    steps_in_stage: int = 0
    age: int = 0
    cooldown: int = 0
    germinations: int = 0
    gradient_norm: float | None = None
    auditions: tuple[Measurement, ...] = ()
    contributions: tuple[Measurement, ...] = ()

    @property
    def alpha(self) -> float:
        """How strongly the seed acts on the main row."""
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
        """In mid-ramp: no op may address the slot."""
        return not self.controller.holding


def evaluate_gate(state: SeedState, target: SeedStage, thresholds: GateThresholds) -> GateResult:
    """The verdict of the gate that guards the step to `target`."""
    return GATES[GATE_OF_TARGET[target]](state, thresholds)


def germinate(
    state: SeedState, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
) -> SeedState:
    """A new seed in a dormant slot."""
    if style not in BLEND_STYLES:
        raise UnknownNameError("blending style", style, BLEND_STYLES)
    require_whole("tempo", tempo, 0, remark="; it is the number of steps of the first ramp")
    require_share("alpha_target", alpha_target)
    if state.stage is not SeedStage.DORMANT:
        alive = state.stage in LIVE_STAGES
        holder = f"holds a {state.blueprint!r} seed" if alive else f"rests for {state.cooldown} more ticks"
        raise SlotOccupiedError(f"slot {state.slot_id!r} {holder} ({state.stage.name}); germinate in a DORMANT one")
    return SeedState(
        state.slot_id,
        SeedStage.GERMINATED,
        blueprint,
        style,
        tempo,
        alpha_target,
        germinations=state.germinations + 1,
    )


def sow(
    state: SeedState,
    slot: SlotSpec,
    blueprint: str,
    *,
    style: str = "add",
    tempo: int = 3,
    alpha_target: float = 1.0,
    budget_left: int | None = None,
) -> SeedState:
    """A new seed of a registered blueprint, if it fits the slot and the budget pays for it (None: no budget)."""
    spec = BlueprintRegistry.spec(slot.topology, blueprint)
    sown = germinate(state, blueprint, style=style, tempo=tempo, alpha_target=alpha_target)
    verdict = gate_germinate(state.stage, spec, slot, style, budget_left)
    if not verdict.passed:
        raise GateRefusedError(f"slot {slot.slot_id!r} may not germinate {blueprint!r}: " + "; ".join(verdict.reasons))
    return sown


def advance(state: SeedState, config: LifecycleConfig) -> SeedState:
    """One transition forward along the main line, if its gate passes."""
    target = {
        SeedStage.GERMINATED: SeedStage.TRAINING,
        SeedStage.TRAINING: SeedStage.BLENDING,
        SeedStage.BLENDING: SeedStage.HOLDING,
        SeedStage.HOLDING: SeedStage.FOSSILIZED,
    }.get(state.stage)
    if target is None:
        remedy = {
            SeedStage.DORMANT: "germinate a seed first",
            SeedStage.FOSSILIZED: "a fossil is permanent",
        }.get(state.stage, f"the slot rests; {state.cooldown} ticks are left")
        raise StageError(f"slot {state.slot_id!r} cannot advance from {state.stage.name}: {remedy}")
    if state.pruning:
        raise StageError(f"slot {state.slot_id!r} is being pruned; it cannot advance")
    verdict = evaluate_gate(state, target, config.thresholds)
    if not verdict.passed:
        raise GateRefusedError(
            f"slot {state.slot_id!r} may not go from {state.stage.name} to {target.name} yet: "
            + "; ".join(verdict.reasons)
        )
    moved = enter(state, target)
    if target is SeedStage.BLENDING:
        # The first non-zero alpha acts in the very next training.
        return replace(moved, controller=state.controller.retarget(state.alpha_target, state.tempo).step())
    return moved


def enter(state: SeedState, target: SeedStage) -> SeedState:
    """Take a step of the transition table; the stage's counter starts anew."""
    if not can_transition(state.stage, target):
        raise StageError(f"slot {state.slot_id!r}: there is no step from {state.stage.name} to {target.name}")
    entered = replace(state, stage=target, steps_in_stage=0)
    # G5 judges a seed at the alpha that it holds: what was measured on the way there says nothing of that.
    return replace(entered, contributions=()) if target is SeedStage.HOLDING else entered


def fossilize(state: SeedState, config: LifecycleConfig) -> SeedState:
    """Commit a held seed for good."""
    if state.stage is not SeedStage.HOLDING:
        raise StageError(f"slot {state.slot_id!r} cannot fossilise from {state.stage.name}; only a HOLDING seed can")
    return advance(state, config)


def set_alpha_target(state: SeedState, target: float, steps: int, curve: str = "linear") -> SeedState:
    """Send a held seed to another alpha; it blends on its way there."""
    if state.stage is not SeedStage.HOLDING:
        raise StageError(f"slot {state.slot_id!r} has no alpha to set in {state.stage.name}; only a HOLDING seed has")
    require_share("alpha target", target, remark="; to silence a seed, prune it")
    require_whole("steps", steps, 0, remark="; it is the length of the ramp")
    controller = state.controller.retarget(target, steps, curve).step()
    blending = enter(state, SeedStage.BLENDING)
    return replace(blending, alpha_target=target, controller=controller, contributions=())


def prune(state: SeedState, config: LifecycleConfig, *, steps: int = 0, curve: str = "linear") -> SeedState:
    """Cut the seed: at once, or by a ramp to 0 that cannot be addressed until it ends."""
    if state.stage not in LIVE_STAGES or state.stage is SeedStage.FOSSILIZED:
        why = "a fossil is permanent" if state.stage is SeedStage.FOSSILIZED else "there is no seed in it"
        raise StageError(f"slot {state.slot_id!r} cannot be pruned in {state.stage.name}: {why}")
    require_whole("steps", steps, 0, remark="; it is the length of the ramp, 0 to cut at once")
    if curve not in ALPHA_CURVES:
        raise UnknownNameError("alpha curve", curve, ALPHA_CURVES)
    if state.stage is SeedStage.TRAINING and state.steps_in_stage < config.min_prune_age:
        raise GateRefusedError(
            f"slot {state.slot_id!r} has trained for {state.steps_in_stage} steps; "
            f"it may be pruned after {config.min_prune_age}"
        )
    if state.ramping:
        raise StageError(f"slot {state.slot_id!r} is in mid-ramp; it can be pruned when alpha holds")
    if steps == 0 or state.alpha == 0.0:
        return cut(state, config)
    blending = state if state.stage is SeedStage.BLENDING else enter(state, SeedStage.BLENDING)
    controller = state.controller.retarget(0.0, steps, curve).step()
    begun = replace(blending, pruning=True, controller=controller, contributions=())
    return begun if begun.alpha > 0.0 else cut(begun, config)


def cut(state: SeedState, config: LifecycleConfig) -> SeedState:
    """The seed is gone; the slot begins to rest."""
    enter(state, SeedStage.PRUNED)
    return SeedState(state.slot_id, SeedStage.PRUNED, cooldown=config.cooldown, germinations=state.germinations)


def tick(state: SeedState, config: LifecycleConfig) -> tuple[SeedState, tuple[StageChange, ...]]:
    """The end of a step: counters, schedules, timers, and the transitions that happen by themselves."""
    before = state.stage
    if state.stage in COOLDOWN_STAGES:
        state = _rest(state)
    elif state.stage in LIVE_STAGES:
        state = replace(state, steps_in_stage=state.steps_in_stage + 1, age=state.age + 1)
        if state.stage is SeedStage.GERMINATED:
            state = enter(state, SeedStage.TRAINING)
        elif state.stage is SeedStage.BLENDING:
            state = _ramp(state, config)
    if state.stage is before:
        return state, ()
    return state, (StageChange(state.slot_id, before, state.stage, "tick"),)


def _rest(state: SeedState) -> SeedState:
    """PRUNED and RESETTING last one tick each, EMBARGOED the rest of the timer."""
    left = state.cooldown - 1
    stage = {0: SeedStage.DORMANT, 1: SeedStage.RESETTING}.get(left, SeedStage.EMBARGOED)
    steps = state.steps_in_stage + 1 if stage is state.stage else 0
    return replace(state, stage=stage, cooldown=left, steps_in_stage=steps)


def _ramp(state: SeedState, config: LifecycleConfig) -> SeedState:
    """A ramp that has been trained at its target ends; any other goes one step on."""
    if state.controller.holding:
        return enter(state, SeedStage.HOLDING)
    moved = replace(state, controller=state.controller.step())
    if moved.pruning and moved.alpha == 0.0:
        return cut(moved, config)
    return moved


def record_gradient(state: SeedState, norm: float) -> SeedState:
    """The norm of the seed's last gradient."""
    return replace(state, gradient_norm=norm if math.isfinite(norm) else math.inf)


def record_audition(state: SeedState, measured: Measurement) -> SeedState:
    """A shadow row was compared with the main row."""
    return replace(state, auditions=(*state.auditions, measured)[-MEASUREMENTS_KEPT:])


def record_contribution(state: SeedState, measured: Measurement) -> SeedState:
    """The main row was compared with this seed silenced."""
    return replace(state, contributions=(*state.contributions, measured)[-MEASUREMENTS_KEPT:])


def seed_parameters(slot: SlotSpec, state: SeedState) -> int:
    """Parameters of the seed and its gate; 0 where there is none."""
    if state.blueprint is None:
        return 0
    return BlueprintRegistry.spec(slot.topology, state.blueprint).count(slot.width) + gate_parameters(
        state.style, slot.width
    )


def report(state: SeedState, parameters: int) -> SeedReport:
    """What a controller may know of a slot."""
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
