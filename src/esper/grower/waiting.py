"""Slots that wait for their Grower.

Frameworks load a checkpoint before they build the optimizer, and so before a Grower can exist. With waiting slots the
model takes the state dict of a model that grows. A Grower that is built later adopts them. Without one, the model
computes what it did when it was saved.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from esper.grower import ranks
from esper.grower.averages import adopt_earlier
from esper.grower.container import CHILD, ModelSlots
from esper.kasmina.attach import check_model
from esper.leyline import BadValueError


def expect_seeds(model: nn.Module) -> None:
    """Let a model without a Grower load the state dict of one that grows. A Grower may be built later."""
    host = ranks.unwrap(model)
    check_waiting(host)
    waiting_slots(host).waiting = True


def check_waiting(host: nn.Module) -> None:
    """Raise if a model cannot get a Grower, or has one already."""
    slots = getattr(host, CHILD, None)
    if slots is None:
        check_model(host)
    elif not slots.waiting:
        raise BadValueError("the model has a Grower already: finish() that one first, or build the model anew")


def waiting_slots(host: nn.Module) -> ModelSlots:
    """The slots that wait in a model, on its device by now; new ones if there are none."""
    slots = getattr(host, CHILD, None)
    if slots is None:
        slots = ModelSlots(host)
        adopt_earlier(slots)
        host.add_module(CHILD, slots)
    for slot_id, slot in slots.items():
        like = host.get_parameter(slots.like[slot_id])
        slot.to(device=like.device, dtype=like.dtype)
    assert isinstance(slots, ModelSlots)
    return slots


@contextmanager
def hidden_seeds(host: nn.Module) -> Iterator[None]:
    """Hide waiting seeds, while an optimizer is built from the model as it was before growth."""
    slots = host._modules.pop(CHILD, None)
    try:
        yield
    finally:
        if slots is not None:
            host.add_module(CHILD, slots)
