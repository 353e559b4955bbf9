"""What a fleet refuses, and that it has changed nothing then."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fleets import assert_same_env, image_batches, make_fleet, task_of, text_batches

from esper.leyline import (
    BadValueError,
    DataError,
    EsperError,
    GateRefusedError,
    SlotOccupiedError,
    StageError,
    UnknownNameError,
)
from esper.tolaria import HostFleet, get_task


@pytest.mark.parametrize("n", [0, -1])
def test_a_fleet_needs_hosts(n: int) -> None:
    """At least one."""
    with pytest.raises(BadValueError, match=f"at least 1, not {n}"):
        HostFleet(task_of("cnn"), n)


@pytest.mark.parametrize("seeds", [[], [1, 2], [1, 2, 3, 4]])
def test_each_host_needs_a_seed(seeds: list[int]) -> None:
    """Neither more nor fewer."""
    with pytest.raises(BadValueError, match=f"{len(seeds)} seeds for 3 hosts"):
        HostFleet(task_of("cnn"), 3, seeds=seeds)


@pytest.mark.parametrize("device", ["warp9", "", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there(device: str) -> None:
    """Whatever torch says about it, the error is ours and names the device."""
    with pytest.raises(BadValueError, match=re.escape(f"device {device!r}")):
        HostFleet(task_of("cnn"), 2, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_cuda_where_there_is_none() -> None:
    """Refused before any data is read."""
    with pytest.raises(BadValueError, match="cuda"):
        HostFleet(get_task("cifar_baseline"), 2, "cuda", data_dir="nowhere")


def test_data_smaller_than_a_batch() -> None:
    """Images and text."""
    with pytest.raises(DataError, match="fewer than a batch of 16"):
        image_batches(task_of("cnn"), count=15)
    with pytest.raises(DataError, match="too few for 8 windows"):
        text_batches(task_of("gpt"), count=13)
    with pytest.raises(DataError, match="2000"):
        HostFleet(replace(get_task("digits"), batch=2_000), 2)


Attempt = Callable[[HostFleet], object]
REFUSED: dict[str, tuple[Attempt, type[EsperError]]] = {
    "env too high": (lambda fleet: fleet.germinate(8, "r1c0", "norm"), UnknownNameError),
    "env negative": (lambda fleet: fleet.germinate(-1, "r1c0", "norm"), UnknownNameError),
    "advance nobody": (lambda fleet: fleet.advance(8, "r1c0"), UnknownNameError),
    "extract nobody": (lambda fleet: fleet.extract(8), UnknownNameError),
    "extract the last but": (lambda fleet: fleet.extract(-1), UnknownNameError),
    "slot": (lambda fleet: fleet.germinate(0, "r9c9", "norm"), UnknownNameError),
    "slot of the host, not of the task": (lambda fleet: fleet.germinate(0, "r0c0", "norm"), UnknownNameError),
    "blueprint": (lambda fleet: fleet.germinate(0, "r1c0", "cathedral"), UnknownNameError),
    "blueprint of another topology": (lambda fleet: fleet.germinate(0, "r1c0", "lora"), UnknownNameError),
    "style": (lambda fleet: fleet.germinate(0, "r1c0", "norm", style="swirl"), UnknownNameError),
    "tempo": (lambda fleet: fleet.germinate(0, "r1c0", "norm", tempo=-1), BadValueError),
    "alpha": (lambda fleet: fleet.germinate(0, "r1c0", "norm", alpha_target=1.5), BadValueError),
    "budget": (lambda fleet: fleet.germinate(0, "r1c2", "conv_heavy"), GateRefusedError),
    "budget for the gate": (lambda fleet: fleet.germinate(0, "r1c2", "conv_light", style="gate"), GateRefusedError),
    "occupied": (lambda fleet: fleet.germinate(2, "r1c0", "norm"), SlotOccupiedError),
    "resting": (lambda fleet: fleet.germinate(6, "r1c0", "norm"), SlotOccupiedError),
    "nothing to advance": (lambda fleet: fleet.advance(0, "r1c0"), StageError),
    "nothing to prune": (lambda fleet: fleet.prune(0, "r1c0"), StageError),
    "a fossil": (lambda fleet: fleet.prune(5, "r1c0"), StageError),
    "a ramp": (lambda fleet: fleet.prune(3, "r1c0"), StageError),
    "ramp backwards": (lambda fleet: fleet.prune(4, "r1c0", steps=-1), BadValueError),
    "curve": (lambda fleet: fleet.prune(4, "r1c0", steps=2, curve="spiral"), UnknownNameError),
    "target": (lambda fleet: fleet.set_alpha_target(4, "r1c0", 0.0), BadValueError),
    "target of one that trains": (lambda fleet: fleet.set_alpha_target(2, "r1c0", 0.5), StageError),
    "fossil of one that trains": (lambda fleet: fleet.fossilize(2, "r1c0"), StageError),
}


@pytest.fixture(scope="module")
def grown() -> HostFleet:
    """With room for a `conv_light` in the last slot of env 0, but not for its gate. Copy before use."""
    fleet = make_fleet(task_of("cnn"))
    offers = {offer.name: offer.parameters for offer in fleet.slots["r1c2"].blueprints}
    fleet.budget = offers["conv_light"]
    return fleet


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_has_changed_nothing(what: str, grown: HostFleet) -> None:
    """Typed errors; no weight, state, bank or plan has moved."""
    attempt, error = REFUSED[what]
    fleet = copy.deepcopy(grown)
    plan, banks = fleet.update_plan(), list(fleet.banks)
    with pytest.raises(error):
        attempt(fleet)
    assert fleet.update_plan() is plan
    assert list(fleet.banks) == banks
    for env in range(fleet.n):
        assert_same_env(fleet, grown, env)


@pytest.fixture(scope="module")
def trained(grown: HostFleet) -> HostFleet:
    """The same after a step of training: no weight is as it was drawn, and every optimiser has momentum."""
    fleet = copy.deepcopy(grown)
    fleet.train_step()
    for env, slot_id in ((2, "r1c0"), (3, "r1c0"), (4, "r1c0"), (5, "r1c2")):
        bank = fleet.banks[slot_id, str(fleet.states[env][slot_id].blueprint)]
        assert all(state[env].any() for state in bank.optimizer.state.values())
    return fleet


@pytest.mark.invariant(5)
@pytest.mark.parametrize(
    ("env", "slot_id"), [(2, "r1c0"), (3, "r1c0"), (4, "r1c0"), (5, "r1c0"), (5, "r1c2"), (6, "r1c0")]
)
@pytest.mark.parametrize("blueprint", [None, "norm"], ids=["its own", "another"])
def test_a_refused_germination_leaves_a_trained_seed_alone(
    env: int, slot_id: str, blueprint: str | None, trained: HostFleet
) -> None:
    """TRAINING, BLENDING, HOLDING, FOSSILIZED or at rest. Replanting would show in weights or momentum."""
    fleet = copy.deepcopy(trained)
    plan, banks = fleet.update_plan(), list(fleet.banks)
    with pytest.raises(SlotOccupiedError):
        fleet.germinate(env, slot_id, blueprint or fleet.states[env][slot_id].blueprint or "conv_light")
    assert fleet.update_plan() is plan
    assert list(fleet.banks) == banks
    for bank, before in zip(fleet.banks.values(), trained.banks.values(), strict=True):
        assert torch.equal(bank.weights.matrix, before.weights.matrix)
    for each in range(fleet.n):
        assert_same_env(fleet, trained, each)


def test_the_budget_is_each_envs_own(grown: HostFleet) -> None:
    """What fits exactly is granted, and then nothing more; another env has its own."""
    fleet = copy.deepcopy(grown)
    fleet.germinate(0, "r1c2", "conv_light")
    assert fleet.grown_parameters(0) == fleet.budget
    with pytest.raises(GateRefusedError, match="0 of the budget are left"):
        fleet.germinate(0, "r1c0", "norm")
    fleet.prune(0, "r1c2")
    assert fleet.grown_parameters(0) == 0
    fleet.germinate(0, "r1c0", "norm")


def test_verbs_tell_what_they_did() -> None:
    """As a single model's do."""
    fleet = make_fleet(task_of("cnn"), 2, grown=False)
    change = fleet.germinate(1, "r1c0", "norm")
    assert (change.slot_id, change.source.name, change.target.name, change.cause) == (
        "r1c0",
        "DORMANT",
        "GERMINATED",
        "germinate",
    )
    ((env, change),) = fleet.tick()
    assert (env, change.source.name, change.target.name, change.cause) == (1, "GERMINATED", "TRAINING", "tick")
    assert fleet.step_index == 1
    assert fleet.tick() == []
