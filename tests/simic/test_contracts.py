"""The protocols between learning and whatever grows."""

import inspect
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, get_args, get_type_hints

import gymnasium
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


# -- all public lists -------------------------------------------------------------------------------------------------

DOORS = (
    *("leyline", "tolaria", "tamiyo", "tamiyo.policies"),
    *("simic.agent", "simic.control", "simic.rewards", "simic.telemetry"),
)
MAY_BE_ANY = {
    "Learned.__init__": "environments with spaces of any kind",
    "Learned.act": "arrays of any kind of number",
    "Learned.load": "environments, as above",
    "learn": "environments, as above",
    "Learned.evaluate": "environments, as above",
    "Evaluation.__init__": "environments, as above",
    "Policy.act": "each policy has its own kind of state",
    "Policy.initial_state": "likewise",
    "TamiyoRolloutBuffer.moved": "tensors, or named tuples of them",
    "load_agent": "dataclasses of the types that the caller names",
}
ONLY_FOR_THE_CHECKER = {"gymnasium": gymnasium, "VectorEnv": gymnasium.vector.VectorEnv, "Any": Any, "NDArray": list}
"""Names that modules import for the type checker alone. (NumPy spells its arrays with an Any of its own.)"""


def public_calls(door: str) -> Iterator[tuple[str, FunctionType]]:
    """Functions and methods that a package offers, by name."""
    package = import_module(f"esper.{door}")
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, FunctionType):
            yield name, value
        for key, member in vars(value).items() if isinstance(value, type) else ():
            call = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            public = key in ("__init__", "__call__") or not key.startswith("_")
            if public and isinstance(call, FunctionType) and call.__module__.startswith("esper."):
                yield f"{name}.{key}", call


@pytest.mark.requirement(53)
@pytest.mark.parametrize("door", DOORS)
def test_public_calls_are_typed(door: str) -> None:
    """Every argument and result of everything public has a type, and hardly any of them is Any."""
    found = dict(public_calls(door))
    assert len(found) > 3
    for name, call in found.items():
        hints = get_type_hints(call, localns=ONLY_FOR_THE_CHECKER)
        assert set(hints) == {*inspect.signature(call).parameters, "return"} - {"self", "cls"}, name
        loose = [key for key, hint in hints.items() if any(part is Any for part in parts_of(hint))]
        assert not loose or name in MAY_BE_ANY, f"{name}: {loose}"


@pytest.mark.requirement(53)
def test_the_checker_is_strict_everywhere() -> None:
    """Over all of the source, and no module of ours is let off."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] is True
    assert "src" in settings["files"]
    assert not {"exclude", "disable_error_code", "ignore_errors"} & set(settings)
    assert not [
        name for name, value in settings.items() if name.startswith(("disallow", "check", "warn")) and not value
    ]
    for override in settings["overrides"]:
        assert set(override) == {"module", "ignore_missing_imports"}
        assert not [module for module in override["module"] if module.startswith("esper")]
