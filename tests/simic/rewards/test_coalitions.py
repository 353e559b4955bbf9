"""Coalitions of real seeds: in hosts of a fleet, in a model, in an attached network."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import Comparison, GateThresholds, LifecycleConfig, attach, lifecycle
from esper.leyline import Measurement, SeedStage, UnknownNameError
from esper.simic.rewards.attribution import (
    ActingSeeds,
    Attribution,
    attribute,
    leave_one_out,
    sampled_shapley,
    seeds_of_host,
    seeds_of_model,
)
from esper.tolaria import HostFleet, get_task

AT_ONCE = LifecycleConfig(thresholds=GateThresholds(min_training_steps=0))
"""No waiting: seeds blend as soon as they are planted."""
SMALL = replace(get_task("digits_blind"), batches_per_step=8, batch=32, calibration_size=64, validation_size=200)
TWO, THREE, BARE = 0, 4, 1
"""Hosts by how many of their seeds act"""


def plant(
    fleet: HostFleet, env: int, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 0, target: float = 1.0
) -> None:
    """A seed that acts from the next step on."""
    fleet.germinate(env, slot_id, blueprint, style=style, tempo=tempo, alpha_target=target)
    fleet.advance(env, slot_id)
    fleet.states[env][slot_id] = lifecycle.record_gradient(fleet.states[env][slot_id], 1.0)
    fleet.advance(env, slot_id)


@torch.no_grad()
def shake(tensors: list[Tensor]) -> None:
    """Move weights by noise, so that no seed is as silent as it was born."""
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        tensor += 0.5 * torch.randn(tensor.shape, generator=generator)


@pytest.fixture(scope="module")
def grown() -> tuple[HostFleet, list[Comparison]]:
    """Hosts that have trained with their seeds, as they were last measured."""
    fleet = HostFleet(SMALL, 5, config=AT_ONCE)
    plant(fleet, TWO, "r1c0", "bottleneck", tempo=2)
    plant(fleet, TWO, "r1c1", "depthwise", style="gate")
    fleet.germinate(TWO, "r1c2", "norm")
    plant(fleet, 2, "r1c0", "bottleneck")
    plant(fleet, THREE, "r1c0", "conv_light")
    plant(fleet, THREE, "r1c1", "depthwise", style="multiply", target=0.7)
    plant(fleet, THREE, "r1c2", "conv_small")
    for _ in range(4):
        fleet.train_step()
        fleet.tick()
    fleet.train_step()
    return fleet, fleet.validate()


def agree(found: tuple[Measurement, ...], reported: list[Measurement]) -> bool:
    """The same points; errors are those of a sample, or of a count of discordant predictions."""
    values = [seed.value for seed in found] == pytest.approx([seed.value for seed in reported], abs=1e-6)
    return values and [seed.error for seed in found] == pytest.approx([seed.error for seed in reported], rel=0.01)


def sums_up(found: Attribution) -> bool:
    """Values sum to all seeds against none."""
    return sum(seed.value for seed in found.seeds) == pytest.approx(found.together.value, abs=1e-9)


def everyone(seeds: ActingSeeds) -> frozenset[int]:
    """The coalition of all."""
    return frozenset(range(len(seeds.slots)))


def right(seeds: ActingSeeds, *coalition: int) -> Tensor:
    """Which images a coalition gets right."""
    correct = seeds.score(frozenset(coalition)).correct
    assert correct is not None
    return correct


# -- one host of a fleet ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "acting"), [(TWO, 2), (THREE, 3)])
def test_leave_one_out_is_the_contribution(grown: tuple[HostFleet, list[Comparison]], env: int, acting: int) -> None:
    """That `validate` reports; and all seeds together are the main row, image by image."""
    fleet, found = grown
    seeds = seeds_of_host(fleet, env)
    assert seeds.slots == SMALL.slot_ids[:acting]
    reported = [found[env].contributions[slot_id].points for slot_id in seeds.slots]
    assert any(abs(seed.value) > 2 for seed in reported), "they matter"
    assert agree(leave_one_out(seeds.score, acting).seeds, reported)
    assert torch.equal(right(seeds, *everyone(seeds)), found[env].main.hits)


@pytest.mark.parametrize("env", [TWO, THREE])
def test_a_models_leave_one_out_is_its_contribution(grown: tuple[HostFleet, list[Comparison]], env: int) -> None:
    """That `measure` reports."""
    fleet, _ = grown
    images, calibration = fleet.batches.validation(), fleet.batches.calibration(SMALL.calibration_size)
    model = fleet.extract(env)
    seeds = seeds_of_model(model, *images, calibration)
    found = model.measure(*images, calibration)
    assert seeds.slots == tuple(found.contributions)
    reported = [contribution.points for contribution in found.contributions.values()]
    assert agree(leave_one_out(seeds.score, len(seeds.slots)).seeds, reported)
    assert torch.equal(right(seeds, *everyone(seeds)), found.main.hits)


@pytest.mark.parametrize(("env", "coalitions"), [(TWO, 4), (THREE, 8)])
def test_values_sum_to_all_against_none(grown: tuple[HostFleet, list[Comparison]], env: int, coalitions: int) -> None:
    """Exact; and sampled orders agree with them within their errors."""
    seeds = seeds_of_host(grown[0], env)
    exact = attribute(seeds)
    assert (exact.method, exact.evaluations) == ("exact", coalitions)
    assert sums_up(exact)
    whole = seeds.score(everyone(seeds)).accuracy - seeds.score(frozenset()).accuracy
    assert exact.together.value == pytest.approx(whole)
    sampled = sampled_shapley(seeds.score, len(seeds.slots), orders=8)
    assert sums_up(sampled)
    for truth, estimate in zip(exact.seeds, sampled.seeds, strict=True):
        assert abs(estimate.value - truth.value) < 3 * estimate.error


def test_a_coalition_is_the_host_without_the_others(grown: tuple[HostFleet, list[Comparison]]) -> None:
    """By another way: hosts with their fossils alone, on validation and on other images."""
    fleet, _ = grown
    for images, final in ((None, False), (fleet.batches.test(), True)):
        committed = fleet.validate_committed(final=final)
        for env in (TWO, THREE):
            assert torch.equal(right(seeds_of_host(fleet, env, images)), committed[env].hits)
    before = dict(fleet.states[THREE])
    fossil = replace(before["r1c1"], stage=SeedStage.FOSSILIZED)
    fleet.adopt(THREE, before | {"r1c1": fossil})
    try:
        assert torch.equal(right(seeds_of_host(fleet, THREE), 1), fleet.validate_committed()[THREE].hits)
    finally:
        fleet.adopt(THREE, before)


def test_nothing_is_left_behind(grown: tuple[HostFleet, list[Comparison]]) -> None:
    """No weight, statistic or state is other than before, of this host and of its neighbours."""
    fleet, _ = grown
    tensors = [fleet.host.weights.matrix, *fleet.host.buffers.values()]
    tensors += [bank.weights.matrix for bank in fleet.banks.values()]
    before, states = [tensor.clone() for tensor in tensors], [dict(each) for each in fleet.states]
    attribute(seeds_of_host(fleet, THREE))
    assert states == fleet.states
    assert all(torch.equal(tensor, then) for tensor, then in zip(tensors, before, strict=True))


def test_hosts_without_acting_seeds_and_hosts_that_are_not_there(grown: tuple[HostFleet, list[Comparison]]) -> None:
    """The one has nothing to attribute, the other is refused."""
    found = attribute(seeds_of_host(grown[0], BARE))
    assert (found.seeds, found.evaluations) == ((), 0)
    with pytest.raises(UnknownNameError, match="env 5"):
        seeds_of_host(grown[0], 5)


# -- many seeds, other hosts ------------------------------------------------------------------------------------------


def test_more_than_four_seeds_are_sampled() -> None:
    """Five in a fleet of one: fewer coalitions than the 32 are scored, and the values still sum up."""
    slots = ("r0c0", "r1c0", "r0c1", "r1c1", "r1c2")
    task = replace(SMALL, slot_ids=slots, calibration_size=32, validation_size=60, budget=5_000)
    fleet = HostFleet(task, 1, config=AT_ONCE)
    for slot_id in slots:
        plant(fleet, 0, slot_id, "norm")
    shake([weights.matrix for weights in (fleet.host.weights, *(bank.weights for bank in fleet.banks.values()))])
    seeds = seeds_of_host(fleet, 0)
    found = attribute(seeds, orders=4)
    assert seeds.slots == slots
    assert (found.method, len(found.seeds)) == ("sampled", 5)
    assert found.evaluations < 32
    assert sums_up(found)
    assert any(seed.value for seed in found.seeds)


def test_an_attached_network() -> None:
    """Its slots lie behind submodules of its own."""
    images, labels = torch.randn(64, 1, 4, 4), torch.randint(10, (64,))
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    model = attach(net, {"2": 8, "4": 8}, example=images[:2], config=AT_ONCE)
    for slot_id in ("2", "4"):
        model.germinate_seed(slot_id, "conv_light", tempo=0)
        model.advance(slot_id)
        model.observe_gradients({slot_id: 1.0})
        model.advance(slot_id)
    shake(list(model.parameters()))
    seeds = seeds_of_model(model, images, labels, images)
    reported = [each.points for each in model.measure(images, labels, images).contributions.values()]
    assert seeds.slots == ("2", "4")
    assert any(seed.value for seed in reported)
    assert agree(leave_one_out(seeds.score, 2).seeds, reported)
