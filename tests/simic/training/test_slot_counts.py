"""Any number of slots: one object says how many, and everything is built from it."""

from dataclasses import replace

import pytest
import torch

from esper.kasmina import CNNHost
from esper.leyline import BadValueError, LifecycleOp, head_preset
from esper.simic.agent import PPOAgent
from esper.simic.rewards import RewardConfig
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import growth_ppo
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.hosts import Groups
from esper.tolaria import HostFleet, Task, get_task

STEPS = 5


def build_host() -> CNNHost:
    """Seven blocks, three of them pooled: slots in front of every pool and behind it, ten in all."""
    return CNNHost((4, 4, 8, 8, 8, 8, 8), 1, 3, 10, in_channels=1, resolution=8)


def task_of(slots: int) -> Task:
    """That host with its first so many slots in use."""
    names = tuple(slot.slot_id for slot in build_host().slots)
    assert len(names) == 10
    return replace(
        get_task("digits_blind"),
        name=f"{slots} slots",
        build_host=build_host,
        slot_ids=names[:slots],
        steps=STEPS,
        batches_per_step=1,
        batch=8,
        calibration_size=16,
        validation_size=50,
    )


def collector_of(slots: int) -> RoundCollector:
    """A group of three hosts and their control."""
    groups = Groups(1, 3)
    runner = EpisodeRunner(HostFleet(task_of(slots), groups.hosts), groups, head_preset("core"))
    agent = PPOAgent(runner.table, runner.layout, replace(growth_ppo(), steps=STEPS), total_updates=3)
    return RoundCollector([runner], agent, RewardConfig(), rng_seed=0)


@pytest.mark.requirement(72)
@pytest.mark.parametrize("slots", range(1, 11))
@pytest.mark.default_cases("1", "3", "10")
def test_a_full_round_with_any_number_of_slots(slots: int) -> None:
    """Features, masks, heads and buffer follow the task's slots through collection and update."""
    collector = collector_of(slots)
    (runner,), agent, buffer = collector.runners, collector.agent, collector.buffer
    names = runner.fleet.task.slot_ids
    (record,) = collector.collect(0)
    assert runner.slots is runner.fleet.task.slot_config
    assert runner.slots.slot_ids == tuple(runner.fleet.slots) == names
    assert runner.layout.slots == runner.table.heads[1].size == slots
    assert record.features.shape == (STEPS, 3, runner.layout.size)
    assert buffer.masks["slot"].shape[-1] == slots
    assert buffer.masks["blueprint"].shape[-2:] == (slots, len(runner.slots.blueprint_names))
    germinated = record.actions[record.actions[..., 0] == int(LifecycleOp.GERMINATE)]
    assert len(germinated) > 0
    assert 0 <= int(germinated[:, 1].min()) <= int(germinated[:, 1].max()) < slots
    tried = {change.change.slot_id for _, change in record.changes if change.change.cause == "germinate"}
    assert tried == {names[slot] for slot in germinated[:, 1].tolist()}
    metrics = agent.update(buffer)
    assert metrics.minibatches_taken > 0
    assert metrics.behaviour_gap <= 1e-5


@pytest.mark.requirement(72)
def test_the_policy_is_the_same_whatever_the_slots() -> None:
    """No weight depends on the number of slots or on their ids."""
    shapes = [
        {name: weight.shape for name, weight in collector_of(slots).agent.network.named_parameters()}
        for slots in (1, 4, 10)
    ]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.requirement(72)
def test_a_round_of_another_host_is_refused() -> None:
    """A buffer that does not match its policy is refused before the update."""
    three, four = collector_of(3), collector_of(4)
    three.collect(0)
    before = [weight.clone() for weight in four.agent.network.parameters()]
    with pytest.raises(BadValueError, match=r"'slot': 3.*'slot': 4"):
        four.agent.update(three.buffer)
    assert all(torch.equal(old, new) for old, new in zip(before, four.agent.network.parameters(), strict=True))
