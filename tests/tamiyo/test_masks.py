"""What may be done: complete actions, always some, and only in slots that are ready."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tamiyo.policies import SHARP, decide, slots
from tamiyo.test_features import over, random_signals
from torch import Tensor

from esper.leyline import RELEVANCE, BadValueError, HeadPreset, LifecycleOp, SeedStage, head_preset
from esper.leyline.actions import HEAD_PRESETS
from esper.tamiyo import (
    ActionTable,
    FactoredRecurrentActorCritic,
    TrainingSignals,
    growth_layout,
    growth_masks,
    growth_table,
    signals_to_features,
)

LAST_DRAW = 1 - 2**-24
"""The largest float32 below 1."""
READY = {
    LifecycleOp.SET_ALPHA_TARGET: "can_retarget",
    LifecycleOp.PRUNE: "can_prune",
    LifecycleOp.FOSSILIZE: "can_fossilize",
    LifecycleOp.ADVANCE: "can_advance",
}
"""Ops on a seed, and the signal that allows each."""


def masks_of(signals: TrainingSignals, preset: str | HeadPreset = "full") -> tuple[dict[str, Tensor], ActionTable]:
    """Masks and their table, for as many slots and three blueprints."""
    heads = head_preset(preset) if isinstance(preset, str) else preset
    table = growth_table(heads, slots(signals.slots.stage.shape[1]))
    return growth_masks(signals, table, heads.ops), table


def idle(n: int = 1, count: int = 2) -> TrainingSignals:
    """Dormant slots where nothing fits: there is nothing to do."""
    signals = random_signals(n, count)
    for name in ("stage", "ramping", *READY.values()):
        getattr(signals.slots, name).zero_()
    signals.offers.fits.zero_()
    return signals


def legal_ops(masks: dict[str, Tensor], env: int = 0) -> set[LifecycleOp]:
    """Of an env."""
    return {op for op in LifecycleOp if masks["op"][env, op]}


def may(signals: TrainingSignals, ops: tuple[LifecycleOp, ...], env: int, op: LifecycleOp, slot: int) -> bool:
    """Whether an op may address a slot: the rules once more, one slot at a time."""
    here = signals.slots
    if op not in ops or op is LifecycleOp.WAIT or bool(here.ramping[env, slot]):
        return False
    if op is LifecycleOp.GERMINATE:
        return int(here.stage[env, slot]) == SeedStage.DORMANT and bool(signals.offers.fits[env, slot].any())
    return bool(getattr(here, READY[op])[env, slot])


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_with_nothing_to_do_one_waits() -> None:
    """A host that is full: WAIT is all there is."""
    masks, _ = masks_of(idle())
    assert legal_ops(masks) == {LifecycleOp.WAIT}
    assert not masks["slot"].any()


def test_a_dormant_slot_germinates_what_fits() -> None:
    """Blueprint 1 fits in slot 1; slot 0 has nothing to offer."""
    signals = idle()
    signals.offers.fits[0, 1, 1] = True
    masks, _ = masks_of(signals)
    assert legal_ops(masks) == {LifecycleOp.WAIT, LifecycleOp.GERMINATE}
    assert masks["slot"][0, LifecycleOp.GERMINATE].tolist() == [False, True]
    assert masks["blueprint"][0, 1].tolist() == [False, True, False]


@pytest.mark.parametrize("stage", list(SeedStage)[1:])
def test_only_a_dormant_slot_germinates(stage: SeedStage) -> None:
    """Whatever fits."""
    signals = idle()
    signals.offers.fits[:] = True
    signals.slots.stage[:] = stage
    assert legal_ops(masks_of(signals)[0]) == {LifecycleOp.WAIT}


@pytest.mark.parametrize(("op", "ready"), READY.items())
def test_an_op_needs_its_gate(op: LifecycleOp, ready: str) -> None:
    """And it may address the slot whose gate passes, no other."""
    signals = idle()
    getattr(signals.slots, ready)[0, 1] = True
    masks, _ = masks_of(signals)
    assert legal_ops(masks) == {LifecycleOp.WAIT, op}
    assert masks["slot"][0, op].tolist() == [False, True]
    signals.slots.ramping[0, 1] = True
    assert legal_ops(masks_of(signals)[0]) == {LifecycleOp.WAIT}


def test_what_the_preset_lacks_is_never_legal() -> None:
    """`core` has no SET_ALPHA_TARGET; a preset of one's own may lack more."""
    signals = random_signals(300)
    assert not masks_of(signals, "core")[0]["op"][:, LifecycleOp.SET_ALPHA_TARGET].any()
    assert masks_of(signals, "full")[0]["op"].any(0).all()
    ops = (LifecycleOp.WAIT, LifecycleOp.GERMINATE)
    masks, _ = masks_of(signals, HeadPreset("sow", ("op", "slot", "blueprint"), ops))
    assert set.union(*(legal_ops(masks, env) for env in range(300))) == set(ops)


def test_other_heads_are_open() -> None:
    """Any tempo, any curve."""
    masks, table = masks_of(random_signals(5), "full")
    assert set(masks) == set(table.names)
    assert all(mask.all() for name, mask in masks.items() if name not in ("op", "slot", "blueprint"))


# -- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(7)
@settings(max_examples=25, deadline=None)
@given(preset=st.sampled_from(sorted(HEAD_PRESETS)), count=st.integers(1, 6), seed=st.integers(0, 9999))
def test_masks_are_the_rules(preset: str, count: int, seed: int) -> None:
    """Env by env, op by op, slot by slot; an op is legal where a slot is, and WAIT always."""
    signals, ops = random_signals(8, count, seed=seed), head_preset(preset).ops
    masks, table = masks_of(signals, preset)
    table.check_masks(masks, 8)
    wanted = torch.zeros(8, len(LifecycleOp), count, dtype=torch.bool)
    for env, op, slot in product(range(8), LifecycleOp, range(count)):
        wanted[env, op, slot] = may(signals, ops, env, op, slot)
    assert torch.equal(masks["slot"], wanted)
    legal = wanted.any(-1)
    legal[:, LifecycleOp.WAIT] = True
    assert torch.equal(masks["op"], legal)
    assert torch.equal(masks["blueprint"], signals.offers.fits)


@pytest.mark.invariant(7)
@settings(max_examples=40, deadline=None)
@given(preset=st.sampled_from(sorted(HEAD_PRESETS)), count=st.integers(1, 6), seed=st.integers(0, 9999))
def test_every_action_that_is_drawn_is_complete(preset: str, count: int, seed: int) -> None:
    """Some op is always legal, and whatever the draws, heads that matter end in what is allowed, the others in their
    placeholder."""
    n = 24
    signals, ops = random_signals(n, count, seed=seed), head_preset(preset).ops
    masks, table = masks_of(signals, preset)
    assert masks["op"].any(-1).all()
    torch.manual_seed(seed)
    layout = growth_layout(slots(count))
    network = FactoredRecurrentActorCritic(table, layout, SHARP)
    uniform = torch.rand(n, len(table))
    uniform[0], uniform[1] = 0.0, LAST_DRAW
    decision = decide(network, signals_to_features(signals, layout), masks, uniform=uniform, epsilon=0.5)
    assert (decision.choices > 0).all()
    for env, row in enumerate(decision.actions.tolist()):
        action = dict(zip(table.names, row, strict=True))
        op = LifecycleOp(action["op"])
        for place, head in enumerate(table.heads):
            used = head.name in RELEVANCE[op]
            assert bool(decision.causal[env, place]) == used
            if not used:
                assert action[head.name] == head.placeholder
        assert op is LifecycleOp.WAIT or may(signals, ops, env, op, action["slot"])
        if op is LifecycleOp.GERMINATE:
            assert signals.offers.fits[env, action["slot"], action["blueprint"]]


def test_draws_reach_every_op() -> None:
    """The property above would hold for one that only ever waits."""
    signals = random_signals(400)
    masks, table = masks_of(signals)
    layout = growth_layout(slots(3))
    network = FactoredRecurrentActorCritic(table, layout)
    flat = signals_to_features(signals, layout)
    decision = decide(network, flat, masks, uniform=torch.rand(400, len(table)))
    assert set(decision.actions[:, 0].tolist()) == set(LifecycleOp)


def test_nothing_is_read_back_from_the_device() -> None:
    """On a device that holds no numbers at all, reading one would raise."""
    masks, _ = masks_of(over(random_signals(4), lambda part: part.to("meta")))
    assert {mask.device.type for mask in masks.values()} == {"meta"}


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_preset_without_wait_is_refused() -> None:
    """With nothing else to do no op would be legal."""
    with pytest.raises(BadValueError, match="lack WAIT"):
        masks_of(idle(), HeadPreset("busy", ("op", "slot", "blueprint"), (LifecycleOp.GERMINATE,)))


def test_a_table_of_another_host_is_refused() -> None:
    """Three slots in the signals, two in the table."""
    heads = head_preset("core")
    with pytest.raises(BadValueError, match="mask of head 'slot'"):
        growth_masks(random_signals(4, 3), growth_table(heads, slots(2)), heads.ops)
