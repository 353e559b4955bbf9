"""Complete actions as one list: how many there are, and which of them are legal."""

from itertools import product

import numpy as np
import pytest
from tamiyo.policies import slots
from tamiyo.test_features import random_signals
from tamiyo.test_masks import masks_of, may

from esper.integrations.complete_actions import CompleteActions
from esper.leyline import LifecycleOp, head_preset
from esper.leyline.actions import HEAD_PRESETS
from esper.tamiyo import growth_masks, growth_table


def actions_of(preset: str, count: int) -> CompleteActions:
    """The actions for so many slots that offer three blueprints."""
    heads = head_preset(preset)
    return CompleteActions(growth_table(heads, slots(count)), heads.ops)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_how_many_there_are(count: int) -> None:
    """core 1 + S·B + 3·S, commit 1 + S·B, full 1 + S·(27·B + 82); all different, and WAIT is the first."""
    assert len(actions_of("core", count)) == 1 + count * 3 + 3 * count
    assert len(actions_of("commit", count)) == 1 + count * 3
    assert len(actions_of("full", count)) == 1 + count * (27 * 3 + 82)
    for preset in HEAD_PRESETS:
        actions = actions_of(preset, count)
        assert len({tuple(row) for row in actions.rows}) == len(actions)
        assert actions.rows[0, 0] == LifecycleOp.WAIT


@pytest.mark.parametrize("preset", sorted(HEAD_PRESETS))
def test_what_is_legal(preset: str) -> None:
    """As the rules say, one action at a time; in 40 random states every op is legal somewhere."""
    ops, actions, met = head_preset(preset).ops, actions_of(preset, 3), set()
    for seed in range(40):
        signals = random_signals(1, 3, seed=seed)
        masks, _ = masks_of(signals, preset)
        expected = []
        for op, slot, blueprint in actions.rows[:, :3]:
            legal = op == LifecycleOp.WAIT or may(signals, ops, 0, LifecycleOp(op), slot)
            expected.append(legal and (op != LifecycleOp.GERMINATE or bool(signals.offers.fits[0, slot, blueprint])))
        legal = actions.legal(masks)
        assert legal.tolist() == expected
        met |= {LifecycleOp(op) for op in actions.rows[legal][:, 0]}
    assert met == set(ops)


def test_what_an_op_does_not_use_is_ignored() -> None:
    """WAIT is action 0 whatever the slot; ADVANCE has a slot and no blueprint."""
    actions = actions_of("core", 2)
    assert {actions.index([LifecycleOp.WAIT, slot, blueprint]) for slot, blueprint in product(range(2), range(3))} == {
        0
    }
    first, second = ([actions.index([LifecycleOp.ADVANCE, slot, b]) for b in range(3)] for slot in range(2))
    assert len(set(first)) == len(set(second)) == 1 and first != second
    assert [actions.index(row.tolist()) for row in actions.rows] == list(range(len(actions)))


def test_the_choices_of_each_head() -> None:
    """By hand: one seed that may advance, one slot that may germinate the second blueprint."""
    actions = actions_of("core", 2)
    signals = random_signals(1, 2)
    for name in ("stage", "ramping", "can_prune", "can_fossilize", "can_advance"):
        getattr(signals.slots, name).zero_()
    signals.slots.stage[0, 0] = 2
    signals.slots.can_advance[0, 0] = True
    signals.offers.fits[:] = False
    signals.offers.fits[0, 1, 1] = True
    heads = head_preset("core")
    legal = actions.legal(growth_masks(signals, actions.table, heads.ops))
    assert [actions.rows[index].tolist() for index in np.flatnonzero(legal)] == [
        [LifecycleOp.WAIT, 0, 0],
        [LifecycleOp.GERMINATE, 1, 1],
        [LifecycleOp.ADVANCE, 0, 0],
    ]
    ops, slot, blueprint = actions.legal_choices(legal)
    assert [op for op, allowed in zip(actions.ops, ops, strict=True) if allowed] == [
        LifecycleOp.WAIT,
        LifecycleOp.GERMINATE,
        LifecycleOp.ADVANCE,
    ]
    assert (slot.tolist(), blueprint.tolist()) == ([True, True], [True, True, False])
