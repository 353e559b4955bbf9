"""Hosts of a fleet are independent, and all randomness of a host follows from its seed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from fleets import (
    ADAMW,
    SEEDLINGS,
    Kind,
    assert_same,
    assert_same_env,
    assert_same_scores,
    everything_of,
    grow,
    image_batches,
    make_fleet,
    task_of,
)
from torch import Tensor

from esper.kasmina import MorphogeneticModel
from esper.leyline import derive_seed
from esper.tolaria import HostFleet

ENV = 4
"""The one that something happens to. It has seeds in BLENDING, HOLDING and TRAINING."""
STEPS = 2
"""Of four minibatches."""

KINDS = pytest.mark.parametrize("kind", ["cnn", "gpt"])


def other_weights(fleet: HostFleet) -> None:
    """Another host altogether."""
    fleet.host.weights.matrix[ENV] *= -1.7


def nan_host(fleet: HostFleet) -> None:
    """Weights and statistics."""
    fleet.host.weights.matrix[ENV] = torch.nan
    for buffer in fleet.host.buffers.values():
        buffer[ENV] = torch.nan


def nan_seeds(fleet: HostFleet) -> None:
    """Whatever grows in it."""
    for bank in fleet.banks.values():
        bank.weights.matrix[ENV] = torch.nan


def infinite_momentum(fleet: HostFleet) -> None:
    """What the optimiser remembers."""
    for tensor in fleet.optimizer.state.values():
        tensor[ENV] = torch.inf


def fast(fleet: HostFleet) -> None:
    """A learning rate that ruins it."""
    fleet.rate_scale[ENV] = 1e6


def prune(fleet: HostFleet) -> None:
    """One seed less in a bank where others stay: the groups remain in their buckets."""
    fleet.prune(ENV, fleet.task.slot_ids[0])


def replace_seed(fleet: HostFleet) -> None:
    """A seed goes, and its slot rests."""
    fleet.prune(ENV, fleet.task.slot_ids[2])


Change = Callable[[HostFleet], None]
CHANGES: list[Change] = [other_weights, nan_host, nan_seeds, infinite_momentum, fast, prune, replace_seed]


@pytest.mark.invariant(12)
@KINDS
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.default_cases(
    "other_weights-cnn",
    "nan_host-gpt",
    "nan_seeds-cnn",
    "infinite_momentum-cnn",
    "fast-cnn",
    "prune-gpt",
    "replace_seed-cnn",
)
def test_what_happens_to_one_changes_no_bit_of_another(kind: Kind, change: Change) -> None:
    """Weights, seeds, statistics, momentum, states, losses and validation of the others are unchanged."""
    calm, troubled = make_fleet(task_of(kind)), make_fleet(task_of(kind))
    change(troubled)
    others = [env for env in range(calm.n) if env != ENV]
    for _ in range(STEPS):
        expected, losses = calm.train_step(), troubled.train_step()
        assert torch.equal(losses[others], expected[others])
        before, after = calm.validate(), troubled.validate()
        for env in others:
            assert_same_scores(after[env], before[env])
            assert_same_env(troubled, calm, env)
        calm.tick()
        troubled.tick()
    assert everything_of(calm, ENV).keys() != everything_of(troubled, ENV).keys() or not torch.equal(
        everything_of(calm, ENV)["host"], everything_of(troubled, ENV)["host"]
    ), "the change has changed nothing"


def test_a_birth_changes_no_bit_of_another() -> None:
    """A seed that joins a bank, in its bucket."""
    calm, troubled = make_fleet(task_of("cnn")), make_fleet(task_of("cnn"))
    troubled.germinate(0, "r1c0", "conv_light", style="multiply")
    troubled.advance(0, "r1c0")
    for _ in range(STEPS):
        for fleet in (calm, troubled):
            fleet.train_step()
            fleet.validate()
            fleet.tick()
    for env in range(1, calm.n):
        assert_same_env(troubled, calm, env)
    # The newborn trains in the shadow: its own host does not know of it either.
    assert torch.equal(troubled.host.weights.matrix[0], calm.host.weights.matrix[0])


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(12)
def test_a_member_that_waits_has_gain_zero() -> None:
    """Envs 0 and 1, and 4 and 5, wait; their mates grow, train in the shadow and blend. Not one image differs."""
    fleet = make_fleet(task_of("cnn"), seeds=[5, 5, 5, 5, 9, 9, 9, 9], grown=False)
    for step in range(4):
        for env, blueprint in ((2, "conv_light"), (3, "depthwise"), (6, "conv_light"), (7, "attention")):
            if step == 0:
                fleet.germinate(env, "r1c1", blueprint, tempo=2)
                fleet.advance(env, "r1c1")
            elif step == 2:
                fleet.advance(env, "r1c1")
        losses = fleet.train_step()
        found = fleet.validate()
        fleet.tick()
        for control, waiting in ((0, 1), (4, 5)):
            assert losses[control] == losses[waiting]
            assert_same_scores(found[waiting], found[control])
            assert found[waiting].main.accuracy - found[control].main.accuracy == 0.0
            assert_same(everything_of(fleet, waiting), everything_of(fleet, control))
    for control, grown in ((0, 2), (0, 3), (4, 6), (4, 7)):
        assert not torch.equal(fleet.host.weights.matrix[control], fleet.host.weights.matrix[grown])
    assert not torch.equal(fleet.host.weights.matrix[0], fleet.host.weights.matrix[4])


# -- what is random ---------------------------------------------------------------------------------------------------


@pytest.mark.invariant(13)
def test_initial_weights_follow_from_the_seed() -> None:
    """Neither the other hosts nor the global generator changes them."""
    task = task_of("cnn")
    torch.manual_seed(1)
    fleet = make_fleet(task, 4, seeds=[3, 1, 4, 1], grown=False)
    torch.manual_seed(2)
    other = make_fleet(task, 2, seeds=[1, 7], grown=False)
    assert_same(everything_of(fleet, 1), everything_of(fleet, 3))
    assert_same(everything_of(fleet, 1), everything_of(other, 0))
    assert not torch.equal(fleet.host.weights.matrix[0], fleet.host.weights.matrix[1])
    lone = dict(task.make_host(4).named_parameters())
    for name, leaf in fleet.host.weights.leaves.items():
        assert torch.equal(leaf[2], lone[name])


def test_data_follow_from_the_seed() -> None:
    """Order, shifts and flips of a minibatch: those of a lone host with that seed, the same for all of a group."""
    task = replace(task_of("cnn"), shift=1, flip=True)
    fleet = make_fleet(task, 4, seeds=[3, 1, 4, 1], grown=False)
    batches = image_batches(task)
    for index in (0, 5, 30):  # within the first pass over the data, and later
        inputs, targets = fleet.draw(index)
        assert torch.equal(inputs[1], inputs[3])
        assert not torch.equal(inputs[0], inputs[1])
        for env, seed in enumerate(fleet.seeds):
            alone = batches.minibatch(derive_seed(seed, "data"), index)
            assert torch.equal(inputs[env], alone.inputs)
            assert torch.equal(targets[env], alone.targets)


def seed_weights(fleet: HostFleet, env: int, slot_id: str, blueprint: str) -> Tensor:
    """Of one seed."""
    return fleet.banks[slot_id, blueprint].weights.matrix[env].clone()


@pytest.mark.invariant(13)
def test_a_seeds_weights_follow_from_slot_and_number() -> None:
    """Equal in a group, new for each germination, and equal to those of a single model."""
    fleet = make_fleet(task_of("cnn"), 4, seeds=[3, 1, 4, 1], grown=False)
    model = MorphogeneticModel(task_of("cnn").make_host(1), fleet.task.slot_ids, rng_seed=derive_seed(1, "seeds"))
    drawn = []
    for number in range(3):
        torch.manual_seed(number)
        for env in (0, 1):
            fleet.germinate(env, "r1c1", "conv_light", style="gate")
        fleet.germinate(3, "r1c2", "conv_light")  # what is planted elsewhere makes no difference …
        fleet.germinate(3, "r1c1", "conv_light", style="gate")
        model.germinate_seed("r1c1", "conv_light", style="gate")
        mine, mate, stranger = (seed_weights(fleet, env, "r1c1", "conv_light") for env in (1, 3, 0))
        assert torch.equal(mine, mate)
        assert not torch.equal(mine, stranger)
        planted = torch.cat([parameter.detach().flatten() for parameter in model.seed_parameters("r1c1")])
        assert torch.equal(mine, planted)
        drawn.append(mine)
        for env in (0, 1, 3):
            fleet.prune(env, "r1c1")
        fleet.prune(3, "r1c2")
        model.prune_seed("r1c1")
        for _ in range(3):
            fleet.tick()
            model.tick()
    assert not any(torch.equal(left, right) for left, right in pairwise(drawn))


@pytest.mark.invariant(13)
def test_two_runs_are_bit_equal() -> None:
    """The same seeds, the same fleet, with AdamW too."""
    torch.manual_seed(1)
    first = make_fleet(task_of("gpt", ADAMW))
    torch.manual_seed(2)
    second = make_fleet(task_of("gpt", ADAMW))
    for _ in range(2):
        for fleet in (first, second):
            fleet.train_step()
            fleet.validate()
            fleet.tick()
            torch.rand(3)
    for env in range(first.n):
        assert_same_env(first, second, env)


@pytest.mark.invariant(12)
@KINDS
@pytest.mark.parametrize("n", [9, 24, 64])
@pytest.mark.parametrize("batch", [8, 16, 32])
@pytest.mark.default_cases("8-24-cnn", "32-24-cnn", "8-9-gpt")
def test_bits_do_not_depend_on_the_number_of_hosts(kind: Kind, n: int, batch: int) -> None:
    """Eight hosts in a fleet of eight, and in larger ones, where others have seeds in the same banks too.

    With 32 inputs groups have no spare entries, and those of a single seed are alone."""
    task = replace(task_of(kind), batch=batch)
    few, many = make_fleet(task), make_fleet(task, n)
    others = [replace(one, env=env) for env in range(8, n) for one in SEEDLINGS[kind] if one.env == env % 8]
    grow(many, others, task.slot_ids)
    for _ in range(STEPS):
        few.train_step(), many.train_step()
        scores, more = few.validate(), many.validate()
        for env in range(few.n):
            assert_same_scores(more[env], scores[env])
            assert_same_env(many, few, env)
        few.tick(), many.tick()


@pytest.mark.invariant(12)
def test_growth_next_door_changes_no_bit_of_a_bare_host() -> None:
    """Not even the order in which memory is summed: with a seed that acts, gradients take another way."""
    task = replace(task_of("cnn"), batch=32)
    bare, grown = make_fleet(task, grown=False), make_fleet(task, grown=False)
    grow(grown, [one for one in SEEDLINGS["cnn"] if one.env == ENV], task.slot_ids)
    for _ in range(STEPS):
        for fleet in (bare, grown):
            fleet.train_step()
            fleet.tick()
        for env in range(bare.n):
            if env != ENV:
                assert_same_env(grown, bare, env)
