"""The governor: faults are caught before the next decision and undone by snapshots of constant size."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
import torch
from fleets import AT_ONCE, Seedling, assert_same, assert_same_env, everything_of, grow, held_bytes, make_fleet, task_of
from torch import Tensor, nn

from esper.kasmina.layers import Statistics
from esper.kasmina.norms import BatchNorm2d
from esper.leyline import SeedStage
from esper.tolaria import HostFleet, Panic, Symptom, get_task
from esper.tolaria.batches import Samples

TASK = replace(get_task("digits"), steps=20, batches_per_step=6)
ENV = 2
"""The one that is harmed. It has a seed in TRAINING, one in BLENDING and one that waits."""
SEEDLINGS = (
    Seedling(0, 0, "conv_light", "add", SeedStage.TRAINING),
    Seedling(1, 0, "conv_light", "gate", SeedStage.BLENDING),
    Seedling(ENV, 0, "conv_light", "add", SeedStage.TRAINING),
    Seedling(ENV, 1, "depthwise", "gate", SeedStage.BLENDING),
    Seedling(ENV, 2, "norm", "add", SeedStage.GERMINATED),
)


@pytest.fixture(scope="module")
def trained() -> HostFleet:
    """Four hosts that have left random guessing, with seeds; snapshots are as they stand. Copy before use."""
    fleet = HostFleet(TASK, 4, config=AT_ONCE)
    for _ in range(8):
        fleet.train_step()
        assert fleet.govern(fleet.validate()) == []
        fleet.tick()
    assert float(fleet.losses.max()) < 0.6 * TASK.random_guess_loss
    grow(fleet, SEEDLINGS, TASK.slot_ids)
    fleet.snapshots.take()
    return fleet


@pytest.fixture(scope="module")
def healthy(trained: HostFleet) -> HostFleet:
    """The same after one more step in which nothing happened."""
    fleet = copy.deepcopy(trained)
    fleet.train_step()
    assert fleet.govern(fleet.validate()) == []
    return fleet


# -- faults -----------------------------------------------------------------------------------------------------------


@contextmanager
def nan_weight(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """One weight of the host."""
    fleet.host.weights.matrix[ENV, 5] = torch.nan
    yield samples


@contextmanager
def infinite_weight(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """One weight of the host."""
    fleet.host.weights.matrix[ENV, -1] = torch.inf
    yield samples


@contextmanager
def nan_statistics(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """A running mean, which training does not even read."""
    fleet.host.buffers["segments.2.norm.running_mean"][ENV, 1] = torch.nan
    yield samples


@contextmanager
def infinite_statistics(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """A running variance."""
    fleet.host.buffers["segments.0.norm.running_var"][ENV, 0] = torch.inf
    yield samples


def spoil(gradient: Tensor) -> Tensor:
    """A hook for gradients (envs, …)."""
    spoiled = gradient.clone()
    spoiled[ENV, 0] = torch.nan
    return spoiled


@contextmanager
def nan_gradient(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """Of the first kernel, in this minibatch alone: the optimiser steps over it, so no weight shows it."""
    handle = fleet.host.weights.leaves["segments.0.conv.weight"].register_hook(spoil)
    yield samples
    handle.remove()


@contextmanager
def nan_seed_gradient(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """The same for a seed in TRAINING, whose loss is nobody else's."""
    handle = fleet.banks["r1c0", "conv_light"].weights.whole.register_hook(spoil)
    yield samples
    handle.remove()


@contextmanager
def infinite_seed(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """A weight of the seed in TRAINING: the main row does not see it."""
    fleet.banks["r1c0", "conv_light"].weights.matrix[ENV, 3] = torch.inf
    yield samples


@contextmanager
def nan_acting_seed(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """A weight of the seed that blends."""
    fleet.banks["r1c1", "depthwise"].weights.matrix[ENV, 0] = torch.nan
    yield samples


@contextmanager
def nan_waiting_seed(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """A weight of the seed that does nothing yet."""
    fleet.banks["r1c2", "norm"].weights.matrix[ENV, 0] = torch.nan
    yield samples


@contextmanager
def nan_data(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """One pixel of the group's minibatch."""
    inputs = samples.inputs.clone()
    inputs[ENV, 3, 0, 4, 4] = torch.nan
    yield Samples(inputs, samples.targets)


@contextmanager
def infinite_data(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """A whole image."""
    inputs = samples.inputs.clone()
    inputs[ENV, 0] = torch.inf
    yield Samples(inputs, samples.targets)


@contextmanager
def high_rate(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """A learning rate × 1,000 for one minibatch."""
    fleet.rate_scale[ENV] = 1_000
    yield samples
    fleet.rate_scale[ENV] = 1


@contextmanager
def zeroed_head(fleet: HostFleet, samples: Samples) -> Iterator[Samples]:
    """The last layer: every class is as likely as any other."""
    for name in ("segments.6.linear.weight", "segments.6.linear.bias"):
        fleet.host.weights.leaves[name].detach()[ENV] = 0
    yield samples


Fault = Callable[[HostFleet, Samples], AbstractContextManager[Samples]]
FAULTS: dict[Fault, Symptom] = {
    nan_weight: Symptom.NOT_FINITE,
    infinite_weight: Symptom.NOT_FINITE,
    nan_statistics: Symptom.NOT_FINITE,
    infinite_statistics: Symptom.NOT_FINITE,
    nan_gradient: Symptom.NOT_FINITE,
    nan_seed_gradient: Symptom.NOT_FINITE,
    infinite_seed: Symptom.NOT_FINITE,
    nan_acting_seed: Symptom.NOT_FINITE,
    nan_waiting_seed: Symptom.NOT_FINITE,
    nan_data: Symptom.NOT_FINITE,
    infinite_data: Symptom.NOT_FINITE,
    high_rate: Symptom.RUNAWAY_UPDATE,
    zeroed_head: Symptom.COLLAPSE,
}


def train_with(fleet: HostFleet, fault: Fault, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of training with a fault in the minibatch of that number."""
    sound = fleet.train_minibatch
    count = 0

    def train_minibatch(samples: Samples, rate: float, warm: float = 1.0) -> Tensor:
        nonlocal count
        count += 1
        if count != place + 1:
            return sound(samples, rate, warm)
        with fault(fleet, samples) as spoiled:
            return sound(spoiled, rate, warm)

    with monkeypatch.context() as patch:
        patch.setattr(fleet, "train_minibatch", train_minibatch)
        fleet.train_step()
    assert count == TASK.batches_per_step


def assert_restored(fleet: HostFleet, before: HostFleet, env: int) -> None:
    """An env is what it was, bit for bit, but for the optimisers: they know nothing."""
    assert fleet.states[env] == before.states[env]
    mine, reference = everything_of(fleet, env), everything_of(before, env)
    kept = {name for name in reference if "momentum" not in name and "steps" not in name}
    assert_same({name: mine[name] for name in kept}, {name: reference[name] for name in kept})
    assert mine.keys() == reference.keys()
    for name in mine.keys() - kept:
        assert not mine[name].any(), name


@pytest.mark.requirement(95)
@pytest.mark.parametrize(
    "place", [0, TASK.batches_per_step // 2, TASK.batches_per_step - 1], ids=["first", "mid", "last"]
)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.default_cases("*-mid")
def test_faults_are_caught_before_the_next_decision(
    fault: Fault, place: int, trained: HostFleet, healthy: HostFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in any minibatch of a step restores its env and leaves the others unchanged."""
    fleet = copy.deepcopy(trained)
    train_with(fleet, fault, place, monkeypatch)
    (panic,) = fleet.govern(fleet.validate())
    assert panic.env == ENV
    assert FAULTS[fault] in panic.symptoms
    assert_restored(fleet, trained, ENV)
    for env in {*range(fleet.n)} - {ENV}:
        assert_same_env(fleet, healthy, env)


HEAD = ("segments.6.linear.weight", "segments.6.linear.bias")


@contextmanager
def scaled_head(fleet: HostFleet, factor: float, bias: float = 0.0) -> Iterator[None]:
    """The last layer times a factor, with this much more for the first class; put back at the end."""
    weight, offset = (fleet.host.weights.leaves[name].detach()[ENV] for name in HEAD)
    before = weight.clone(), offset.clone()
    weight *= factor
    offset *= factor
    offset[0] += bias
    yield
    weight.copy_(before[0])
    offset.copy_(before[1])


def show_nan(fleet: HostFleet) -> None:
    """A minibatch with one pixel that is no number."""
    with nan_data(fleet, fleet.draw(0)) as samples:
        fleet.train_minibatch(samples, 0.05)


def show_guesses(fleet: HostFleet) -> None:
    """Logits that are nearly equal, yet differ from image to image: 0.02² is above the limit of flat ones."""
    with scaled_head(fleet, 0.02):
        fleet.train_minibatch(fleet.draw(0), 0.0)


def show_high_losses(fleet: HostFleet) -> None:
    """Three minibatches of confident mistakes."""
    with scaled_head(fleet, -3.0):
        for index in range(3):
            assert fleet.governor.verdicts() == []
            fleet.train_minibatch(fleet.draw(index), 0.0)


def show_flat_logits(fleet: HostFleet) -> None:
    """The same class for every image, which costs more than a guess."""
    with scaled_head(fleet, 0.0, bias=3.0):
        fleet.train_minibatch(fleet.draw(0), 0.0)


def show_large_update(fleet: HostFleet) -> None:
    """One step of a thousand times the rate."""
    with high_rate(fleet, fleet.draw(0)) as samples:
        fleet.train_minibatch(samples, 0.05)


SIGNS: dict[Symptom, Callable[[HostFleet], None]] = {
    Symptom.NOT_FINITE: show_nan,
    Symptom.COLLAPSE: show_guesses,
    Symptom.DIVERGENCE: show_high_losses,
    Symptom.FLAT_LOGITS: show_flat_logits,
    Symptom.RUNAWAY_UPDATE: show_large_update,
}


@pytest.mark.requirement(95)
@pytest.mark.parametrize("symptom", Symptom, ids=lambda symptom: symptom.name)
def test_each_symptom_alone_is_reported(symptom: Symptom, trained: HostFleet) -> None:
    """A fault that shows in one sign only; without that sign nobody would know of it."""
    fleet = copy.deepcopy(trained)
    SIGNS[symptom](fleet)
    assert fleet.governor.verdicts() == [Panic(ENV, (symptom,))]


@pytest.mark.requirement(95)
def test_a_loss_that_is_high_in_validation_alone_is_reported(trained: HostFleet) -> None:
    """Nothing was wrong in training."""
    fleet = copy.deepcopy(trained)
    fleet.train_step()
    with scaled_head(fleet, -3.0):
        found = fleet.validate()
    assert fleet.govern(found) == [Panic(ENV, (Symptom.DIVERGENCE,))]


def panics_after(fleet: HostFleet, fault: Fault) -> dict[int, tuple[Symptom, ...]]:
    """Symptoms by env, before the next decision, of a fault in the first of two minibatches."""
    fleet.snapshots.take()
    with fault(fleet, fleet.draw(0)) as samples:
        fleet.train_minibatch(samples, 0.01)
    fleet.train_minibatch(fleet.draw(1), 0.01)
    return {panic.env: panic.symptoms for panic in fleet.govern(fleet.validate())}


HIDDEN_FAULTS = pytest.mark.parametrize(
    "fault", [nan_weight, nan_data, infinite_data, nan_gradient], ids=lambda fault: fault.__name__
)


@pytest.mark.requirement(95)
@HIDDEN_FAULTS
def test_a_host_with_finite_logits_is_seen(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every pooled ReLU turns a NaN into 0, as the maximum of many a CUDA kernel would, so that all losses are
    finite; gradients and weights still tell."""
    real = BatchNorm2d.relu_pool

    def relu_pool(self: BatchNorm2d, x: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        y, statistics = real(self, x, train)
        return y.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) if train else y, statistics

    monkeypatch.setattr(BatchNorm2d, "relu_pool", relu_pool)
    fleet = make_fleet(task_of("cnn"), grown=False)
    losses: list[Tensor] = []
    observe = fleet.governor.observe

    def watched(*signs: Tensor) -> None:
        losses.append(signs[0])
        observe(*signs)

    monkeypatch.setattr(fleet.governor, "observe", watched)
    found = panics_after(fleet, fault)
    assert list(found) == [ENV]
    assert Symptom.NOT_FINITE in found[ENV]
    assert torch.stack(losses).isfinite().all()


@pytest.mark.requirement(95)
@pytest.mark.gpu
@HIDDEN_FAULTS
def test_a_broken_host_is_seen_on_cuda(fault: Fault) -> None:
    """And no other host panics with it."""
    fleet = make_fleet(task_of("cnn"), device=torch.device("cuda"))
    found = panics_after(fleet, fault)
    assert list(found) == [ENV]
    assert Symptom.NOT_FINITE in found[ENV]
    assert fleet.host.weights.matrix.isfinite().all()


def test_life_goes_on_after_a_panic(trained: HostFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the snapshot on with other data; one panic for one fault."""
    fleet = copy.deepcopy(trained)
    train_with(fleet, nan_weight, 1, monkeypatch)
    assert len(fleet.govern(fleet.validate())) == 1
    fleet.tick()
    for _ in range(2):
        fleet.train_step()
        assert fleet.govern(fleet.validate()) == []
        fleet.tick()
    assert fleet.losses.isfinite().all()
    assert float(fleet.losses.max()) < 0.6 * TASK.random_guess_loss


def test_structure_goes_back_too(trained: HostFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planted since the snapshot is gone, what was cut is there again, what went on goes back."""
    fleet = copy.deepcopy(trained)
    fleet.prune(ENV, "r1c2")
    fleet.prune(ENV, "r1c0")
    for _ in range(3):
        fleet.tick()
    fleet.germinate(ENV, "r1c2", "conv_small", style="gate")
    fleet.germinate(ENV, "r1c0", "bottleneck")
    train_with(fleet, nan_data, 2, monkeypatch)
    (panic,) = fleet.govern(fleet.validate())
    assert panic.env == ENV
    assert_restored(fleet, trained, ENV)
    for blueprint in ("bottleneck", "conv_small"):
        (bank,) = (bank for (_, name), bank in fleet.banks.items() if name == blueprint)
        assert not bank.weights.matrix.any(), "a seed that nobody owns"
    fleet.train_step()
    assert fleet.govern(fleet.validate()) == []


def test_a_minibatch_that_is_not_finite_moves_nothing(trained: HostFleet) -> None:
    """Neither weights nor momentum nor running statistics of its env."""
    fleet = copy.deepcopy(trained)
    with nan_data(fleet, fleet.draw(0)) as samples:
        fleet.train_minibatch(samples, 0.05)
    assert_same(everything_of(fleet, ENV), everything_of(trained, ENV))
    assert not torch.equal(fleet.host.weights.matrix[0], trained.host.weights.matrix[0])


def test_several_hosts_at_once(trained: HostFleet, healthy: HostFleet) -> None:
    """Each goes back for its own reason."""
    fleet = copy.deepcopy(trained)
    fleet.host.weights.matrix[0, 0] = torch.nan
    fleet.host.buffers["segments.0.norm.running_mean"][3, 0] = torch.inf
    fleet.train_step()
    panics = fleet.govern(fleet.validate())
    assert [panic.env for panic in panics] == [0, 3]
    for env in (0, 3):
        assert_restored(fleet, trained, env)
    for env in (1, ENV):
        assert_same_env(fleet, healthy, env)


def test_a_panic_is_told_once(trained: HostFleet) -> None:
    """The signs of a step are forgotten with its verdicts."""
    fleet = copy.deepcopy(trained)
    fleet.host.weights.matrix[1] = torch.nan
    fleet.train_step()
    found = fleet.validate()
    assert [panic.env for panic in fleet.govern(found)] == [1]
    assert fleet.govern(fleet.validate()) == []


# -- memory -----------------------------------------------------------------------------------------------------------


def tensor_bytes() -> int:
    """Of all dense tensors that Python knows of, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter) and found.layout is torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.requirement(7)
def test_snapshots_never_grow() -> None:
    """200 snapshots and 200 edits stay within ±5 % of the memory, all of it on the CPU."""
    fleet = make_fleet(task_of("cnn"), grown=False)
    blueprints = [offer.name for offer in fleet.slots["r1c0"].blueprints][:4]

    def edit(number: int) -> None:
        """Plant or cut in turn, somewhere else each time."""
        env, slot_id = number // 2 % fleet.n, fleet.task.slot_ids[number // 2 % 3]
        if number % 2:
            fleet.prune(env, slot_id)
        else:
            fleet.germinate(env, slot_id, blueprints[number // 2 % 4])
        fleet.tick()
        fleet.snapshots.take()

    for number in range(48):  # once through all that occurs: a bank stays when its last seed goes
        edit(number)
    fleet.train_step()
    stored, seen = [held_bytes(fleet.snapshots._tensors)], [tensor_bytes()]
    for number in range(48, 248):
        edit(number)
        if number % 50 == 0:
            fleet.train_step()
        stored.append(held_bytes(fleet.snapshots._tensors))
    seen.append(tensor_bytes())
    assert max(stored) <= 1.05 * min(stored)
    assert seen[1] <= 1.05 * seen[0]
    assert all(tensor.device.type == "cpu" for tensor in fleet.snapshots._tensors.values())


def test_a_snapshot_is_a_copy() -> None:
    """What is trained afterwards does not reach it, and restoring twice gives the same."""
    fleet = make_fleet(task_of("cnn"))
    before = copy.deepcopy(fleet)
    fleet.snapshots.take()
    for _ in range(2):
        fleet.train_step()
        for env in range(fleet.n):
            fleet.snapshots.restore(env)
            assert_restored(fleet, before, env)


@pytest.mark.requirement(7)
@pytest.mark.gpu
def test_snapshots_of_a_fleet_on_cuda_are_in_host_memory() -> None:
    """Snapshots stay in host memory, and a restored env has the same bits."""
    fleet = make_fleet(task_of("cnn"), device=torch.device("cuda"))
    before = [everything_of(fleet, env) for env in range(fleet.n)]
    assert all(tensor.device.type == "cpu" for tensor in fleet.snapshots._tensors.values())
    fleet.snapshots.take()
    fleet.train_step()
    for env in range(fleet.n):
        fleet.snapshots.restore(env)
        assert_same(everything_of(fleet, env), before[env])
