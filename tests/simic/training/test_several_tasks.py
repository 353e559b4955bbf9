"""One policy on several tasks: who gets which rows, numbers and statistics."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simic.training.tiny import purpose_of, tiny_task

from esper.leyline import BadValueError, head_preset
from esper.leyline.records import decode, encode
from esper.nissa import RoundMeasured, find_metric
from esper.simic.agent import PPOAgent
from esper.simic.rewards import RewardConfig
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import TrainConfig, growth_ppo
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.hosts import Groups
from esper.simic.training.run_folder import read_config
from esper.simic.training.trainer import Trainer
from esper.tolaria import HostFleet, Task, TaskRegistry, get_task

SHORT, TWO_SLOTS = "digits_tiny_short", "digits_tiny_two_slots"


def short_task() -> Task:
    """The tiny task with other hosts, and shorter episodes."""
    if SHORT not in TaskRegistry.names():
        TaskRegistry.register(replace(get_task("digits"), name=SHORT, steps=7, batches_per_step=2, batch=16))
    return get_task(SHORT)


def runner_of(task: Task, groups: int = 1, members: int = 2) -> EpisodeRunner:
    """A fleet of it."""
    shape = Groups(groups, members)
    return EpisodeRunner(HostFleet(task, shape.hosts), shape, head_preset("core"))


def test_each_task_fills_its_own_rows() -> None:
    """Rows, lengths, hosts and draws: those of the first task are as if it were alone."""
    runners = [runner_of(tiny_task()), runner_of(short_task())]
    config = replace(growth_ppo(), steps=12)
    made = [
        PPOAgent(runners[0].table, runners[0].layout, config, total_updates=3, tasks=tasks, rng_seed=3)
        for tasks in (2, 1)
    ]
    both = RoundCollector(runners, made[0], RewardConfig(), rng_seed=4)
    records = both.collect(0)
    assert [(record.task, record.first_env) for record in records] == [("digits_tiny", 0), (SHORT, 2)]
    assert both.buffer.lengths.tolist() == [12, 12, 7, 7]
    assert both.buffer.tasks.tolist() == [0, 0, 1, 1]
    assert both.buffer.ends[torch.arange(4), both.buffer.lengths - 1].all()
    assert [tuple(record.actions.shape) for record in records] == [(12, 2, 3), (7, 2, 3)]
    seeds = [seed for runner in runners for seed in runner.fleet.seeds]
    assert len(set(seeds)) == 2, "a group each, of different hosts"
    assert {purpose_of(seed) for seed in seeds} == {"training"}
    alone = RoundCollector([runner_of(tiny_task())], made[1], RewardConfig(), rng_seed=4)
    [record] = alone.collect(0)
    assert torch.equal(record.actions, records[0].actions)
    assert torch.equal(record.objective, records[0].objective)


def test_statistics_are_those_of_each_task() -> None:
    """Returns and advantages are scaled by their own task; observations of all tasks share one normaliser."""
    runners = [runner_of(tiny_task()), runner_of(short_task())]
    agent = PPOAgent(runners[0].table, runners[0].layout, replace(growth_ppo(), steps=12), tasks=2, rng_seed=3)
    collector = RoundCollector(runners, agent, RewardConfig(), rng_seed=4)
    collector.collect(0)
    assert float(agent.observations.statistics.count[0]) == 2 * 12 + 2 * 7
    agent.update(collector.buffer)
    assert agent.returns.statistics.count.tolist() == [24.0, 14.0]


@pytest.mark.requirement(63)
def test_the_floor_of_advantages_is_that_of_each_task() -> None:
    """The error of a gain, 100·√(0.1 / images): √2.5 points with 400 validation images, √0.5 with 2000. A
    checkpoint stores them, and a single task has one number."""
    few, many = tiny_task(), replace(tiny_task(), name="many images", validation_size=2000)
    config = TrainConfig(task="digits,digits_blind")
    both = config.agent_config(few, many)
    assert both.advantage_floor == pytest.approx((2.5**0.5, 0.5**0.5))
    assert decode(type(both), encode(both), "ppo") == both
    assert TrainConfig().agent_config(few).advantage_floor == pytest.approx(2.5**0.5)
    own = replace(config, ppo=replace(config.ppo, advantage_floor=(1.0, 1.0))).agent_config(few, many)
    assert own.advantage_floor == pytest.approx((2.5**0.5, 1.0))
    with pytest.raises(BadValueError, match=r"advantage_floor has 2 numbers for 1 tasks; use one per task"):
        TrainConfig(ppo=replace(growth_ppo(), advantage_floor=(1.0, 2.0)))


def test_a_run_of_two_tasks(tmp_path: Path) -> None:
    """A line of metrics with each task beside the whole; events name the task; the run goes on where it stopped."""
    tiny_task(), short_task()
    config = TrainConfig(task=f"digits_tiny, {SHORT}", rounds=2, hosts=8, members=3, seed=1)
    trainer = Trainer(config, tmp_path / "run")
    with trainer.folder:
        trainer.run_round()
    assert read_config(tmp_path / "run") == config
    resumed = Trainer(read_config(tmp_path / "run"), tmp_path / "run", resume=True)
    resumed.run(progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1]
    parts = lines[1]["tasks"]
    assert set(parts) == {"digits_tiny", SHORT}
    assert lines[1]["objective"] == pytest.approx(sum(part["objective"] for part in parts.values()) / 2)
    numbers = RoundMeasured(1, lines[1]).numbers()
    assert f"tasks/{SHORT}/reward/gain" in numbers
    assert [name for name in numbers if find_metric(name) is None] == [], "the catalogue knows them all"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    episodes = [(event["task"], event["env"]) for event in events if event["kind"] == "episode" and event["round"] == 1]
    assert episodes == [("digits_tiny", env) for env in range(3)] + [(SHORT, env) for env in range(3, 6)]


def test_hosts_are_shared_evenly() -> None:
    """Hosts that cannot be, and tasks named twice, are refused before anything is built."""
    with pytest.raises(BadValueError, match="7 hosts cannot be divided among tasks"):
        TrainConfig(task="digits,digits_blind", hosts=7)
    with pytest.raises(BadValueError, match="name each task once"):
        TrainConfig(task="digits,digits", hosts=8)


def test_tasks_may_differ_in_their_slots(tmp_path: Path) -> None:
    """One policy for hosts of three slots and of two. Padding is never chosen, and counts in no statistic."""
    if TWO_SLOTS not in TaskRegistry.names():
        TaskRegistry.register(replace(tiny_task(), name=TWO_SLOTS, slot_ids=("r1c0", "r1c1")))
    config = TrainConfig(task=f"{TWO_SLOTS}, digits_tiny", rounds=2, hosts=8, members=3, seed=1)
    trainer = Trainer(config, tmp_path / "run")
    with trainer.folder:
        records = trainer.run_round()
    assert [len(record.slots) for record in records] == [2, 3]
    agent, buffer = trainer.agent, trainer.collector.buffer
    slot = agent.table.index("slot")
    assert int(buffer.actions[:3, :, slot].max()) <= 1, "rows of the hosts with two slots"
    names, counts = agent.layout.column_names, agent.observations.statistics.count
    per_host, per_slot = (float(counts[names.index(name)]) for name in ("time_left", "slot.width"))
    assert (per_host, per_slot) == (6 * 12, 3 * 12 * 2 + 3 * 12 * 3)
    assert trainer.agent.updates == 1
