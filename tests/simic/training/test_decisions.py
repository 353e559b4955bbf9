"""Decisions as they are written down."""

from esper.leyline import HEAD_NAMES, LifecycleOp
from esper.simic.training.recorder import decided
from esper.tolaria import get_task

SLOTS = get_task("digits_blind").slot_config
WAIT, GERMINATE, ADVANCE = (int(op) for op in (LifecycleOp.WAIT, LifecycleOp.GERMINATE, LifecycleOp.ADVANCE))
PRUNE, SET_ALPHA = int(LifecycleOp.PRUNE), int(LifecycleOp.SET_ALPHA_TARGET)


def test_core() -> None:
    """Indices become names; waiting is left out, and so is a blueprint where none is chosen."""
    actions = [[WAIT, 2, 3], [GERMINATE, 1, 2], [WAIT, 0, 0], [ADVANCE, 1, 4]]
    assert decided(actions, ("op", "slot", "blueprint"), SLOTS) == {
        "step": [1, 3],
        "op": ["GERMINATE", "ADVANCE"],
        "slot": [SLOTS.slot_ids[1], SLOTS.slot_ids[1]],
        "blueprint": [SLOTS.blueprint_names[2], None],
    }


def test_full() -> None:
    """Every head has its value under the ops that it belongs to, and under no other."""
    actions = [[GERMINATE, 0, 1, 2, 0, 1, 3, 4], [SET_ALPHA, 2, 1, 2, 0, 0, 1, 1], [PRUNE, 1, 1, 2, 0, 1, 0, 2]]
    found = decided(actions, HEAD_NAMES, SLOTS)
    assert found["blend"] == ["gate", None, None]
    assert found["tempo"] == [3, None, None]
    assert found["alpha_target"] == [0.7, 0.5, None]
    assert found["alpha_speed"] == [None, 3, 0]
    assert found["alpha_curve"] == [None, "cosine", "sigmoid6"]


def test_who_waits_writes_nothing() -> None:
    """The columns are there, empty."""
    assert decided([[WAIT, 0, 0]] * 3, ("op", "slot", "blueprint"), SLOTS) == {
        "step": [], "op": [], "slot": [], "blueprint": [],
    }  # fmt: skip
