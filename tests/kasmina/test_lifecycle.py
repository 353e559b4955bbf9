"""The life of one seed, on the pure functions."""

import json
import math
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina import GateThresholds, LifecycleConfig, SeedState, lifecycle
from esper.leyline import (
    ACTIVE_STAGES,
    ALPHA_CURVES,
    BLEND_STYLES,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    BadValueError,
    EsperError,
    GateRefusedError,
    Measurement,
    SeedStage,
    SlotOccupiedError,
    SlotSpec,
    StageError,
    UnknownNameError,
    can_transition,
)
from esper.leyline.records import decode, encode

CONFIG = LifecycleConfig()
FRESH = SeedState("r0c0")
SLOT = SlotSpec("r0c0", 4, "tokens", position=0.5)

Verb = Callable[[SeedState], SeedState]


def tick(state: SeedState, times: int = 1, config: LifecycleConfig = CONFIG) -> SeedState:
    """So many ends of steps."""
    for _ in range(times):
        state = lifecycle.tick(state, config)[0]
    return state


def measured(state: SeedState) -> SeedState:
    """Gradient and contribution are known."""
    return lifecycle.record_contribution(lifecycle.record_gradient(state, 1.0), Measurement(1.0, 0.1))


def blending(*, style: str = "add", tempo: int = 3, alpha_target: float = 1.0) -> SeedState:
    """A seed that has just begun to blend."""
    seed = lifecycle.germinate(FRESH, SLOT, "norm", style=style, tempo=tempo, alpha_target=alpha_target)
    return lifecycle.advance(measured(tick(seed, 3)), CONFIG)


def at(stage: SeedStage) -> SeedState:
    """A slot at a stage, reached by the verbs."""
    holding = measured(tick(blending(), 4))  # 1/3, 2/3, 1, HOLDING, and one step there
    made: dict[SeedStage, Callable[[], SeedState]] = {
        SeedStage.DORMANT: lambda: FRESH,
        SeedStage.GERMINATED: lambda: lifecycle.germinate(FRESH, SLOT, "norm"),
        SeedStage.TRAINING: lambda: tick(lifecycle.germinate(FRESH, SLOT, "norm")),
        SeedStage.BLENDING: blending,
        SeedStage.HOLDING: lambda: holding,
        SeedStage.FOSSILIZED: lambda: lifecycle.fossilize(holding, CONFIG),
        SeedStage.PRUNED: lambda: lifecycle.prune(holding, CONFIG),
        SeedStage.EMBARGOED: lambda: tick(lifecycle.prune(holding, CONFIG)),
        SeedStage.RESETTING: lambda: tick(lifecycle.prune(holding, CONFIG), 2),
    }
    state = made[stage]()
    assert state.stage is stage
    return state


# -- one life, by hand ------------------------------------------------------------------------------------------------


def test_a_whole_life() -> None:
    """Every stage on the way to a fossil, each change with its cause."""
    seed = lifecycle.germinate(FRESH, SLOT, "norm", style="gate", tempo=2, alpha_target=0.5)
    assert (seed.stage, seed.blueprint, seed.style, seed.germinations) == (SeedStage.GERMINATED, "norm", "gate", 1)
    seed, changes = lifecycle.tick(seed, CONFIG)
    assert [(c.source, c.target, c.cause) for c in changes] == [(SeedStage.GERMINATED, SeedStage.TRAINING, "tick")]
    seed = measured(tick(seed, 2))
    assert (seed.stage, seed.steps_in_stage, seed.age) == (SeedStage.TRAINING, 2, 3)
    seed = lifecycle.advance(seed, CONFIG)
    assert (seed.stage, seed.steps_in_stage, seed.alpha) == (SeedStage.BLENDING, 0, 0.25)
    seed = tick(seed)
    assert (seed.stage, seed.alpha) == (SeedStage.BLENDING, 0.5)
    seed = tick(seed, 2)
    assert (seed.stage, seed.alpha, seed.steps_in_stage, seed.age) == (SeedStage.HOLDING, 0.5, 1, 6)
    seed = lifecycle.fossilize(measured(seed), CONFIG)
    assert (seed.stage, seed.alpha, seed.style) == (SeedStage.FOSSILIZED, 0.5, "gate")
    assert tick(seed, 3) == replace(seed, steps_in_stage=3, age=9)


@pytest.mark.parametrize(
    ("tempo", "alphas"), [(0, [1]), (1, [1]), (3, [1 / 3, 2 / 3, 1]), (5, [0.2, 0.4, 0.6, 0.8, 1])]
)
def test_ramp_trains_at(tempo: int, alphas: list[float]) -> None:
    """A ramp of 3 trains at ⅓, ⅔, 1 and holds then: alpha is set before the step's training."""
    state, seen = blending(tempo=tempo), []
    while state.stage is SeedStage.BLENDING:
        seen.append(state.alpha)
        state = tick(state)
    assert seen == pytest.approx(alphas)
    assert (state.stage, state.alpha) == (SeedStage.HOLDING, 1.0)


def test_contributions_are_those_of_the_alpha_that_is_held() -> None:
    """G5 hears nothing of what was measured on a ramp, nor at the alpha before; auditions stay."""
    state = lifecycle.record_audition(blending(tempo=2), Measurement(2.0, 0.1))
    state = tick(measured(state), 2)
    assert (state.stage, state.contributions) == (SeedStage.HOLDING, ())
    assert state.audition == Measurement(2.0, 0.1)
    held = measured(tick(state))
    assert held.contribution == Measurement(1.0, 0.1)
    sent = lifecycle.set_alpha_target(held, 0.5, 2)
    assert sent.contributions == ()
    back = tick(measured(sent), 3)
    assert (back.stage, back.contributions) == (SeedStage.HOLDING, ())
    with pytest.raises(GateRefusedError, match="its contribution was not measured"):
        lifecycle.fossilize(back, CONFIG)
    assert lifecycle.fossilize(measured(back), CONFIG).stage is SeedStage.FOSSILIZED
    assert lifecycle.prune(held, CONFIG, steps=3).contributions == ()


def test_advance_may_cut_the_wait_short() -> None:
    """At the target, `advance` leads from BLENDING to HOLDING before the tick does; not earlier."""
    state = blending()
    with pytest.raises(GateRefusedError, match=r"alpha 0.333 is on its way to 1.000"):
        lifecycle.advance(state, CONFIG)
    assert lifecycle.advance(tick(state, 2), CONFIG).stage is SeedStage.HOLDING


def test_set_alpha_target() -> None:
    """From 1 to 0.5 in two steps: trains at 0.75 and 0.5, then holds there."""
    state = lifecycle.set_alpha_target(at(SeedStage.HOLDING), 0.5, 2)
    assert (state.stage, state.alpha, state.alpha_target, state.ramping) == (SeedStage.BLENDING, 0.75, 0.5, True)
    assert tick(state).alpha == 0.5
    held = tick(state, 2)
    assert (held.stage, held.alpha) == (SeedStage.HOLDING, 0.5)


def test_set_alpha_target_at_once() -> None:
    """With 0 steps alpha is there for the next training already; one tick later the seed holds."""
    state = lifecycle.set_alpha_target(at(SeedStage.HOLDING), 0.7, 0)
    assert (state.stage, state.alpha, state.ramping) == (SeedStage.BLENDING, 0.7, False)
    assert tick(state).stage is SeedStage.HOLDING


@pytest.mark.parametrize("target", [0.0, -0.5, 1.5, math.nan])
def test_alpha_targets_out_of_range(target: float) -> None:
    """To silence a seed, prune it."""
    with pytest.raises(BadValueError, match=r"\(0, 1\]"):
        lifecycle.set_alpha_target(at(SeedStage.HOLDING), target, 3)
    with pytest.raises(BadValueError, match=r"\(0, 1\]"):
        lifecycle.germinate(FRESH, SLOT, "norm", alpha_target=target)


@pytest.mark.parametrize("curve", ALPHA_CURVES)
def test_prune_by_ramp(curve: str) -> None:
    """A ramp of 3 trains at two falling alphas, is cut by the tick that would reach 0, and cannot be addressed."""
    state = lifecycle.prune(at(SeedStage.HOLDING), CONFIG, steps=3, curve=curve)
    before = 1.0
    for _ in range(2):
        assert state.stage is SeedStage.BLENDING and state.pruning and 0.0 < state.alpha < before
        for name in ("prune", "advance", "set_alpha_target"):
            with pytest.raises(StageError):
                VERBS[name][0](state)
        before, state = state.alpha, tick(state)
    assert state == SeedState("r0c0", SeedStage.PRUNED, cooldown=3, germinations=1)


@pytest.mark.parametrize(("stage", "steps"), [(SeedStage.GERMINATED, 0), (SeedStage.TRAINING, 2)])
def test_prune_of_a_silent_seed_needs_no_ramp(stage: SeedStage, steps: int) -> None:
    """At alpha 0 there is nothing to fade: it is cut at once."""
    assert lifecycle.prune(tick(at(stage), steps), CONFIG, steps=5).stage is SeedStage.PRUNED


def test_prune_age() -> None:
    """PRUNE from TRAINING after 2 steps there; a germinated seed may go at once."""
    assert lifecycle.prune(at(SeedStage.GERMINATED), CONFIG).stage is SeedStage.PRUNED
    for steps, allowed in ((0, False), (1, False), (2, True)):
        seed = tick(at(SeedStage.TRAINING), steps)
        if allowed:
            assert lifecycle.prune(seed, CONFIG).stage is SeedStage.PRUNED
        else:
            with pytest.raises(GateRefusedError, match=f"has trained for {steps} steps; it may be pruned after 2"):
                lifecycle.prune(seed, CONFIG)


@pytest.mark.parametrize("steps", [-1, -5])
def test_negative_ramps(steps: int) -> None:
    """A ramp has 0 steps or more, whoever asks for it."""
    holding = at(SeedStage.HOLDING)
    with pytest.raises(BadValueError):
        lifecycle.prune(holding, CONFIG, steps=steps)
    with pytest.raises(BadValueError):
        lifecycle.set_alpha_target(holding, 0.5, steps)
    with pytest.raises(BadValueError, match="tempo"):
        lifecycle.germinate(FRESH, SLOT, "norm", tempo=steps)


@pytest.mark.invariant(6)
@pytest.mark.parametrize("cooldown", [3, 4, 7])
def test_cooldown_is_exact(cooldown: int) -> None:
    """PRUNED and RESETTING last one tick each, EMBARGOED the rest; then the slot is DORMANT."""
    config = LifecycleConfig(cooldown=cooldown)
    state, stages = lifecycle.prune(at(SeedStage.HOLDING), config), []
    for left in range(cooldown, 0, -1):
        stages.append(state.stage)
        assert state.cooldown == left
        with pytest.raises(SlotOccupiedError, match=f"rests for {left} more ticks"):
            lifecycle.germinate(state, SLOT, "norm")
        state = tick(state, config=config)
    assert stages == [SeedStage.PRUNED, *[SeedStage.EMBARGOED] * (cooldown - 2), SeedStage.RESETTING]
    assert state == SeedState("r0c0", SeedStage.DORMANT, germinations=1)
    assert lifecycle.germinate(state, SLOT, "norm").germinations == 2


@pytest.mark.invariant(6)
@pytest.mark.parametrize("stage", sorted(LIVE_STAGES - {SeedStage.FOSSILIZED}))
def test_prune_frees_everything(stage: SeedStage) -> None:
    """At any live stage, pruning leaves nothing of the seed but the count of attempts."""
    state = at(stage)
    ready = tick(state, 2) if stage in (SeedStage.TRAINING, SeedStage.BLENDING) else state
    assert lifecycle.prune(ready, CONFIG) == SeedState("r0c0", SeedStage.PRUNED, cooldown=3, germinations=1)


# -- what is illegal --------------------------------------------------------------------------------------------------

VERBS: dict[str, tuple[Verb, Set[SeedStage]]] = {
    "germinate": (lambda s: lifecycle.germinate(s, SLOT, "lora"), {SeedStage.DORMANT}),
    "advance": (lambda s: lifecycle.advance(s, CONFIG), LIVE_STAGES - {SeedStage.FOSSILIZED}),
    "fossilize": (lambda s: lifecycle.fossilize(s, CONFIG), {SeedStage.HOLDING}),
    "set_alpha_target": (lambda s: lifecycle.set_alpha_target(s, 0.5, 3), {SeedStage.HOLDING}),
    "prune": (lambda s: lifecycle.prune(s, CONFIG), LIVE_STAGES - {SeedStage.FOSSILIZED}),
}


@pytest.mark.invariant(5)
@pytest.mark.parametrize("stage", SeedStage)
@pytest.mark.parametrize("name", VERBS)
def test_verbs_by_stage(name: str, stage: SeedStage) -> None:
    """A verb that its stage does not allow raises and leaves the state unchanged."""
    verb, legal = VERBS[name]
    state = at(stage)
    before = encode(state)
    if stage in legal:
        return
    with pytest.raises((StageError, SlotOccupiedError), match=stage.name):
        verb(state)
    assert encode(state) == before


@pytest.mark.invariant(5)
@pytest.mark.parametrize("source", SeedStage)
@pytest.mark.parametrize("target", SeedStage)
def test_enter_follows_the_table(source: SeedStage, target: SeedStage) -> None:
    """The one function that changes stages refuses transitions outside the table."""
    state = SeedState("r0c0", source, steps_in_stage=5)
    if can_transition(source, target):
        assert lifecycle.enter(state, target) == SeedState("r0c0", target)
    else:
        with pytest.raises(StageError, match=f"no step from {source.name} to {target.name}"):
            lifecycle.enter(state, target)


@pytest.mark.invariant(5)
def test_fossil_is_permanent() -> None:
    """Advancing or pruning a fossil raises an error that says it is permanent."""
    fossil = at(SeedStage.FOSSILIZED)
    for name in ("advance", "prune"):
        with pytest.raises(StageError, match="a fossil is permanent"):
            VERBS[name][0](fossil)


@pytest.mark.invariant(5)
def test_germinate_where_a_seed_lives() -> None:
    """Germinating in an occupied slot raises an error that names the seed."""
    with pytest.raises(SlotOccupiedError, match=r"holds a 'norm' seed \(TRAINING\)"):
        lifecycle.germinate(at(SeedStage.TRAINING), SLOT, "lora")


@pytest.mark.invariant(15)
def test_unknown_style() -> None:
    """The error names the style and the allowed ones."""
    with pytest.raises(UnknownNameError, match="unknown blending style 'x'; allowed: add, multiply, gate"):
        lifecycle.germinate(FRESH, SLOT, "norm", style="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"cooldown": 2}, "cooldown 2 is not an integer of 3 or more"), ({"min_prune_age": -1}, "min_prune_age -1")],
)
def test_bad_config(change: dict[str, int], message: str) -> None:
    """Timers that cannot be."""
    values: dict[str, Any] = dict(change)  # Any: as keyword arguments
    with pytest.raises(BadValueError, match=message):
        LifecycleConfig(**values)


# -- random walks -----------------------------------------------------------------------------------------------------

steps = st.integers(0, 6)
targets = st.floats(0.01, 1)
Move = tuple[str, Callable[[SeedState, LifecycleConfig], SeedState]]
moves: st.SearchStrategy[Move] = st.one_of(
    # Several times: a life is mostly waiting.
    *[st.just(("tick", lambda s, c: tick(s, config=c)))] * 4,
    *[st.just(("forward", lambda s, c: lifecycle.advance(measured(s), c)))] * 2,
    st.just(("advance", lifecycle.advance)),
    st.just(("fossilize", lifecycle.fossilize)),
    st.just(("measure", lambda s, c: measured(s))),
    st.builds(
        lambda style, tempo, target: (
            "germinate",
            lambda s, c: lifecycle.germinate(s, SLOT, "norm", style=style, tempo=tempo, alpha_target=target),
        ),
        st.sampled_from(BLEND_STYLES),
        steps,
        targets,
    ),
    st.builds(
        lambda target, count, curve: (
            "set_alpha_target",
            lambda s, c: lifecycle.set_alpha_target(s, target, count, curve),
        ),
        targets,
        steps,
        st.sampled_from(ALPHA_CURVES),
    ),
    st.builds(
        lambda count, curve: ("prune", lambda s, c: lifecycle.prune(s, c, steps=count, curve=curve)),
        steps,
        st.sampled_from(ALPHA_CURVES),
    ),
)


@pytest.mark.invariant(5, 6)
@settings(max_examples=150, deadline=None)
@given(
    start=st.sampled_from(SeedStage),
    walk=st.lists(moves, min_size=20, max_size=60),
    config=st.builds(
        LifecycleConfig,
        cooldown=st.integers(3, 6),
        min_prune_age=st.integers(0, 3),
        thresholds=st.builds(GateThresholds, min_training_steps=st.integers(0, 2), strict=st.booleans()),
    ),
)
def test_random_walks(start: SeedStage, walk: list[Move], config: LifecycleConfig) -> None:
    """Random verbs only ever cause transitions of the table, and every state is consistent."""
    state = at(start)
    for name, move in walk:
        before = encode(state)
        if name == "tick":
            after, changes = lifecycle.tick(state, config)
            assert [(c.source, c.target) for c in changes] == [(state.stage, after.stage)] * (
                state.stage != after.stage
            )
        else:
            try:
                after = move(state, config)
            except EsperError:
                assert encode(state) == before
                continue
        assert state.stage is after.stage or can_transition(state.stage, after.stage)
        assert state.stage is not SeedStage.FOSSILIZED or after.stage is SeedStage.FOSSILIZED
        if state.blueprint is not None and after.blueprint is not None:
            assert after.style == state.style  # a style never changes in mid-life
        assert_sensible(after)
        state = after


def assert_sensible(state: SeedState) -> None:
    """What holds at every moment of any life."""
    assert (state.blueprint is not None) == (state.stage in LIVE_STAGES)
    assert (state.cooldown > 0) == (state.stage in COOLDOWN_STAGES)
    assert (state.alpha > 0.0) == (state.stage in ACTIVE_STAGES)
    assert not (state.ramping or state.pruning) or state.stage is SeedStage.BLENDING
    if state.stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED):
        assert state.alpha == state.alpha_target
    assert decode(SeedState, json.loads(json.dumps(encode(state), allow_nan=False)), "state") == state


@pytest.mark.invariant(6)
@settings(deadline=None)
@given(start=st.sampled_from(SeedStage), walk=st.lists(moves, max_size=40))
def test_every_slot_can_be_used_again(start: SeedStage, walk: list[Move]) -> None:
    """Except from a fossil, waiting and pruning reach DORMANT within ramp and cooldown."""
    state = at(start)
    for _, move in walk:
        try:
            state = move(state, CONFIG)
        except EsperError:
            continue
    waited = 0
    while state.stage in LIVE_STAGES - {SeedStage.FOSSILIZED}:
        try:
            state = lifecycle.prune(state, CONFIG)
        except EsperError:
            state, waited = tick(state), waited + 1
        assert waited <= 7  # the longest ramp has 6 steps
    if state.stage is not SeedStage.FOSSILIZED:
        assert tick(state, state.cooldown).stage is SeedStage.DORMANT


# -- notes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "noted"), [(0.5, 0.5), (math.inf, math.inf), (math.nan, math.inf)])
def test_gradient_that_is_not_finite(norm: float, noted: float) -> None:
    """NaN would compare unequal to itself; it is noted as infinite."""
    assert lifecycle.record_gradient(at(SeedStage.TRAINING), norm).gradient_norm == noted


def test_last_two_measurements() -> None:
    """The mean of the last two: (2 + 4)/2 = 3, error sqrt(0.3² + 0.4²)/2 = 0.25; none at first."""
    state = at(SeedStage.TRAINING)
    assert state.audition is None
    for value, error in ((9.0, 9.0), (2.0, 0.3), (4.0, 0.4)):
        state = lifecycle.record_audition(state, Measurement(value, error))
    assert state.audition == Measurement(3.0, 0.25)
    assert state.contribution is None


@pytest.mark.invariant(15)
@pytest.mark.parametrize(
    ("change", "message"),
    [({"stage": "ASLEEP"}, "state.stage is 'ASLEEP'; allowed"), ({"mood": 1}, "'mood'")],
)
def test_bad_json(change: dict[str, object], message: str) -> None:
    """Unknown stages and keys are refused."""
    with pytest.raises(BadValueError, match=message):
        decode(SeedState, encode(FRESH) | change, "state")
