"""Slots as values: ids, specs and the configuration of a task."""

from typing import Any

import pytest

from esper.leyline import (
    BadValueError,
    BlueprintOffer,
    SlotConfig,
    SlotSpec,
    UnknownNameError,
    slot_id,
)


def spec(name: str, *blueprints: str) -> SlotSpec:
    """A slot that offers these blueprints."""
    return SlotSpec(name, 8, "image", 0.5, blueprints=tuple(BlueprintOffer(b, 1, 1, 64) for b in blueprints))


def test_ids() -> None:
    """An id says where its slot is: row 1 lies behind the pool of block 0."""
    assert slot_id(1, 0) == "r1c0"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"width": 0}, BadValueError, "width 0 is not positive"),
        ({"position": -0.1}, BadValueError, r"position -0.1 is not in \[0, 1\]"),
        ({"position": 1.5}, BadValueError, r"position 1.5 is not in \[0, 1\]"),
        ({"position": float("nan")}, BadValueError, r"position nan is not in \[0, 1\]"),
        ({"topology": "sound"}, UnknownNameError, "unknown topology 'sound'; allowed: image, tokens, vector"),
    ],
)
def test_bad_specs(change: dict[str, Any], error: type[Exception], message: str) -> None:  # Any: wrong on purpose
    """A slot that cannot exist is refused when it is described."""
    good: dict[str, Any] = {"slot_id": "r0c0", "width": 8, "topology": "image", "position": 0.5}
    SlotSpec(**good)
    with pytest.raises(error, match=message):
        SlotSpec(**good | change)


def test_order_is_the_action_index() -> None:
    """Slots keep the order in which they were given."""
    config = SlotConfig((spec("r1c0"), spec("r0c1"), spec("r0c0")))
    assert config.slot_ids == ("r1c0", "r0c1", "r0c0")
    assert [config.index(name) for name in config.slot_ids] == [0, 1, 2]
    assert config["r0c1"] is config.slots[1]
    assert len(config) == 3


@pytest.mark.invariant(15)
def test_unknown_slot() -> None:
    """The error lists the ids."""
    config = SlotConfig((spec("r0c0"), spec("r1c0")))
    for look_up in (config.index, config.__getitem__):
        with pytest.raises(UnknownNameError, match="unknown slot 'r9c9'; allowed: r0c0, r1c0"):
            look_up("r9c9")


def test_needs_unique_slots() -> None:
    """At least one slot, no id twice."""
    with pytest.raises(BadValueError, match="at least one"):
        SlotConfig(())
    with pytest.raises(BadValueError, match="unique"):
        SlotConfig((spec("r0c0"), spec("r0c0")))


def test_blueprint_names() -> None:
    """The choices of the blueprint head: each name once, in order of first appearance."""
    config = SlotConfig((spec("r0c0", "norm", "lora"), spec("r0c1", "mlp", "norm"), spec("r0c2")))
    assert config.blueprint_names == ("norm", "lora", "mlp")
