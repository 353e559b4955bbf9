"""The protocols between learning and whatever grows."""

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any, get_args, get_type_hints

import pytest
from torch import nn

from esper.kasmina import CNNHost, MorphogeneticModel, SeedSlot, SeedState
from esper.simic import contracts
from esper.simic.contracts import SeedSlotProtocol, SeedStateProtocol, SlottedHostProtocol

PROTOCOLS = (SeedStateProtocol, SeedSlotProtocol, SlottedHostProtocol)


def members(protocol: type) -> dict[str, object]:
    """Public members by name."""
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_")}


MEMBERS = [(protocol, name) for protocol in PROTOCOLS for name in members(protocol)]


@pytest.fixture(scope="module")
def model() -> MorphogeneticModel:
    """A small host with one seed."""
    model = MorphogeneticModel(CNNHost((4, 8), 1, 2, 10, resolution=8))
    model.germinate_seed("r1c0", "norm")
    return model


# The type checker compares every member with its protocol here.
def as_host(model: MorphogeneticModel) -> SlottedHostProtocol:
    """Check statically that a model is a slotted host."""
    return model


def as_slot(slot: SeedSlot) -> SeedSlotProtocol:
    """Check statically that a slot satisfies its protocol."""
    return slot


def as_state(state: SeedState) -> SeedStateProtocol:
    """Check statically that a state satisfies its protocol."""
    return state


@pytest.mark.requirement(53)
def test_kasmina_satisfies_the_protocols(model: MorphogeneticModel) -> None:
    """The real classes satisfy the protocols at run time, as in the type checker."""
    slot = model.seed_slots["r1c0"]
    assert isinstance(as_host(model), SlottedHostProtocol)
    assert isinstance(as_slot(slot), SeedSlotProtocol)
    assert isinstance(as_state(slot.state), SeedStateProtocol)


@pytest.mark.requirement(53)
def test_through_the_protocol(model: MorphogeneticModel) -> None:
    """Values read through the protocols are those of the model."""
    host = as_host(model)
    slot = host.seed_slots["r1c0"]
    assert slot.spec.slot_id == slot.state.slot_id == "r1c0"
    assert slot.state.blueprint == "norm"
    assert slot.parameter_count == host.grown_parameter_count == 12
    assert slot.report() in host.reports()
    assert host.host_parameter_count == sum(parameter.numel() for parameter in host.host_parameters())


@pytest.mark.parametrize(("protocol", "name"), MEMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_each_member_counts(protocol: type, name: str) -> None:
    """An object with all members passes, and without any one of them it does not."""
    complete = type("Complete", (), members(protocol))
    lacking = type("Lacking", (), {key: value for key, value in members(protocol).items() if key != name})
    assert isinstance(complete(), protocol)
    assert not isinstance(lacking(), protocol)


def test_others_do_not_pass(model: MorphogeneticModel) -> None:
    """Neither a plain module nor one of the other two."""
    slot: object = model.seed_slots["r1c0"]
    whole: object = model
    assert not isinstance(nn.Linear(1, 1), SlottedHostProtocol)
    assert not isinstance(slot, SlottedHostProtocol | SeedStateProtocol)
    assert not isinstance(whole, SeedSlotProtocol | SeedStateProtocol)


def parts_of(hint: object) -> Iterator[object]:
    """A type and everything in its brackets."""
    yield hint
    for argument in get_args(hint):
        yield from parts_of(argument)


@pytest.mark.requirement(53)
@pytest.mark.parametrize(("protocol", "name"), MEMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_no_any(protocol: type, name: str) -> None:
    """Every argument and result has a type, and none of them is Any."""
    member = members(protocol)[name]
    function = member.fget if isinstance(member, property) else member
    assert isinstance(function, FunctionType)
    hints = get_type_hints(function)
    assert set(hints) == {*inspect.signature(function).parameters, "return"} - {"self"}
    assert not any(part is Any or part is object for hint in hints.values() for part in parts_of(hint))


@pytest.mark.requirement(53)
def test_the_module_does_not_know_any() -> None:
    """The module does not even import Any or cast."""
    assert not {"Any", "cast"} & set(vars(contracts))
