"""`esper train --record`: what is recorded is what was learned from, and recording changes nothing."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from simic.offline.made_up import same
from simic.training.smallest import config, results
from simic.training.test_several_tasks import TWO_SLOTS
from simic.training.tiny import make_runner, quick_config, tiny_task

from esper.cli import main
from esper.leyline import BadValueError, derive_seed
from esper.simic.agent import PPOAgent
from esper.simic.offline.episodes import Episodes
from esper.simic.offline.records import Records
from esper.simic.offline.shards import open_shard, record_files
from esper.simic.rewards import RewardConfig
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import TrainConfig, growth_ppo
from esper.simic.training.hosts import host_seed
from esper.simic.training.recorder import Recorder
from esper.simic.training.run_folder import read_config
from esper.simic.training.tape import record_header
from esper.simic.training.trainer import Trainer
from esper.tamiyo.features import fill_in_control_end
from esper.tolaria import TaskRegistry

# -- what is recorded -------------------------------------------------------------------------------------------------

BROKEN_ENV, BROKEN_STEP, CRITIC = 1, 2, 4


def collector_of(reward: RewardConfig) -> RoundCollector:
    """Six hosts in three groups, one of which breaks in the third step of every round."""
    runner = make_runner()
    ppo = replace(growth_ppo(), steps=12, gamma=reward.gamma, explore=0.1)
    agent = PPOAgent(runner.table, runner.layout, ppo, total_updates=3, rng_seed=derive_seed("agent") % 2**62)
    train, fleet = runner.fleet.train_step, runner.fleet

    def faulty() -> torch.Tensor:
        if fleet.step_index == BROKEN_STEP:
            fleet.host.weights.matrix.data[runner.groups.envs[BROKEN_ENV]] = float("nan")
        return train()

    fleet.train_step = faulty  # type: ignore[method-assign]  # a fault
    return RoundCollector([runner], agent, reward, rng_seed=4, taped=True)


@pytest.fixture(scope="module")
def played() -> tuple[RoundCollector, Episodes, torch.Tensor]:
    """A round with a panic, its episodes, and its observations as the policy saw them."""
    collector = collector_of(RewardConfig())
    [record] = collector.collect(0)
    assert [(step, env) for step, env, _ in record.symptoms] == [(BROKEN_STEP, BROKEN_ENV)]
    assert record.episodes is not None
    return collector, record.episodes, record.features.transpose(0, 1)


def test_records_are_what_the_buffer_holds(played: tuple[RoundCollector, Episodes, torch.Tensor]) -> None:
    """Observations with the control's end, masks, actions, log-probs and ends; exploration, hosts and round."""
    collector, episodes, features = played
    buffer, runner = collector.buffer, collector.runners[0]
    assert torch.equal(episodes.observations, features)
    assert all(torch.equal(episodes.masks[name], mask) for name, mask in buffer.masks.items())
    for recorded, held in (
        (episodes.actions, buffer.actions),
        (episodes.log_probs, buffer.log_probs),
        (episodes.terminated, buffer.ends),
    ):
        assert torch.equal(recorded, held)
    assert episodes.panics.nonzero().tolist() == [[BROKEN_ENV, BROKEN_STEP]]
    assert not episodes.truncated.any()
    assert float(episodes.log_probs.min()) < 0
    assert episodes.epsilon.tolist() == pytest.approx([buffer.epsilon] * 6)
    assert buffer.epsilon > 0
    assert episodes.round.tolist() == [0] * 6
    assert episodes.host_seed.tolist() == [host_seed("training", 4, 0, group) for group in (0, 0, 1, 1, 2, 2)]
    assert set(episodes.policy.tolist()) == {0}
    control_end = runner.layout.critic.index("control_end")
    end = episodes.observations[:, 0, -CRITIC + control_end]
    assert len(runner.layout.critic) == CRITIC
    assert torch.equal(end, episodes.control_accuracy[:, -1] / 100)


def test_the_actors_columns_know_nothing_of_the_control(played: tuple[RoundCollector, Episodes, torch.Tensor]) -> None:
    """What is filled in afterwards is in the last columns alone, which a file keeps apart."""
    collector, episodes, _ = played
    layout = collector.runners[0].layout
    others = fill_in_control_end(episodes.observations.transpose(0, 1), layout, torch.full((6,), 42.0)).transpose(0, 1)
    changed = (others != episodes.observations).any(0).any(0).nonzero().flatten().tolist()
    assert changed == [layout.size - CRITIC + layout.critic.index("control_end")]


def test_forced_steps(tmp_path: Path) -> None:
    """Those in which all heads together have one legal action, counted one by one; hosts have a single slot."""
    Trainer(quick_config(1), tmp_path / "run", record=tmp_path / "records").run(progress=False)
    records = Records.open(tmp_path / "records")
    episodes, table = records.episodes(), records.header.table
    masks = {name: mask.flatten(0, 1).tolist() for name, mask in episodes.masks.items()}
    every = list(product(*(range(head.size) for head in table.heads)))

    def legal(cell: int, op: int, slot: int, blueprint: int) -> bool:
        uses = table.relevance[op].tolist()
        ruled = (op, slot * uses[1], blueprint * uses[2]) == (op, slot, blueprint)  # an unused head has no choice
        fits = masks["op"][cell][op] and (masks["slot"][cell][op][slot] or not uses[1])
        return ruled and fits and (masks["blueprint"][cell][slot][blueprint] or not uses[2])

    counts = [sum(legal(cell, *action) for action in every) for cell in range(episodes.forced.numel())]
    assert [count == 1 for count in counts] == episodes.forced.flatten().tolist()
    assert 0 < counts.count(1) < len(counts)


@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_rewards_can_be_recomputed(gamma: float) -> None:
    """At the run's own ρ and γ they are those that were paid, with a panic in the middle of an episode."""
    reward = RewardConfig(gamma=gamma, rho=3.0)
    collector = collector_of(reward)
    [record] = collector.collect(0)
    assert record.episodes is not None
    runner, episodes = collector.runners[0], record.episodes
    header = record_header(runner.fleet.task, runner.preset, ("learned",), runner.layout)
    assert bool(episodes.acting_parameters.any())
    torch.testing.assert_close(episodes.rewards(header, reward), record.rewards.T, rtol=1e-6, atol=1e-5)
    assert float(episodes.rewards(header, reward)[BROKEN_ENV, BROKEN_STEP]) < -5
    torch.testing.assert_close(episodes.objective(2.0), record.objective.float(), rtol=1e-6, atol=1e-5)


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its records, side by side."""
    folder = tmp_path_factory.mktemp("whole")
    Trainer(config(), folder / "run", record=folder / "records").run(progress=False)
    return folder


def test_recording_changes_nothing(whole: Path, tmp_path: Path) -> None:
    """Neither logs nor weights, to the bit; and without it nothing is written beside the run."""
    Trainer(config(), tmp_path / "run").run(progress=False)
    assert results(tmp_path / "run") == results(whole / "run")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert files == {str(path.relative_to(whole)) for path in whole.rglob("*") if "records" not in path.parts}


def test_every_round_is_recorded(whole: Path) -> None:
    """Four rounds of a host and its control, which is not recorded."""
    records = Records.open(whole / "records")
    assert [path.name for path in record_files(whole / "records")] == [
        f"round-0000{number}-0-00000.safetensors" for number in range(4)
    ]
    header, episodes = records.header, records.episodes()
    assert (header.task, header.steps, header.policies) == (config().task, 5, ("learned",))
    assert episodes.round.tolist() == [0, 1, 2, 3]
    assert episodes.host_seed.tolist() == [host_seed("training", 0, number, 0) for number in range(4)]


class StoppedError(Exception):
    """Stands for a kill."""


def test_a_resumed_run_records_every_round_once(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the records of a round and before its checkpoint: that round is played and recorded again."""
    run, records = tmp_path / "run", tmp_path / "records"
    trainer, save = Trainer(config(), run, record=records), Recorder.save

    def stop(self: Recorder, agent: PPOAgent, rounds: int) -> None:
        if rounds == 3:
            raise StoppedError
        save(self, agent, rounds)

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "save", stop)
        with pytest.raises(StoppedError):
            trainer.run(progress=False)
    assert len(record_files(records)) == 3
    resumed = Trainer(read_config(run), run, resume=True, record=records)
    assert len(record_files(records)) == 2, "the third round did not count"
    resumed.run(progress=False)
    assert results(run) == results(whole / "run")
    for own, other in zip(record_files(records), record_files(whole / "records"), strict=True):
        assert own.name == other.name
        # safetensors writes its metadata in any order, so equal files may differ in their bytes.
        assert open_shard(own).content == open_shard(other).content
        assert same(Records.open(own).episodes(), Records.open(other).episodes())


def test_whose_records_these_are(whole: Path, tmp_path: Path) -> None:
    """A new run needs a folder without records, a resumed one its own; nothing is changed by an attempt."""
    run, records = tmp_path / "run", tmp_path / "records"
    shutil.copytree(whole / "records", records)
    with pytest.raises(BadValueError, match=r"--record .*records already holds records; choose another folder"):
        Trainer(config(), run, record=records)
    assert not run.exists()
    Trainer(config(rounds=1, seed=5), run).run(progress=False)
    with pytest.raises(BadValueError, match=r"round-00000-0-00000.safetensors is no record of the run to resume"):
        Trainer(read_config(run), run, resume=True, record=records)
    shutil.rmtree(run)
    shutil.copytree(whole / "run", run)
    (records / "round-00003-0-00000.safetensors").rename(records / "mine.safetensors")
    with pytest.raises(BadValueError, match=r"mine.safetensors was renamed; name it as the run did"):
        Trainer(read_config(run), run, resume=True, record=records)
    assert len(record_files(records)) == 4


def test_tasks_with_other_slots(tmp_path: Path) -> None:
    """Each task is recorded with its own columns and heads, and opened on its own; all actions are legal there."""
    if TWO_SLOTS not in TaskRegistry.names():
        TaskRegistry.register(replace(tiny_task(), name=TWO_SLOTS, slot_ids=("r1c0", "r1c1")))
    settings = TrainConfig(task=f"{TWO_SLOTS}, digits_tiny", rounds=1, hosts=8, members=3, seed=1)
    Trainer(settings, tmp_path / "run", record=tmp_path / "run" / "records").run(progress=False)
    with pytest.raises(BadValueError, match=f"are of tasks 'digits_tiny' and '{TWO_SLOTS}'"):
        Records.open(tmp_path / "run" / "records")
    for task, slots in ((TWO_SLOTS, 2), ("digits_tiny", 3)):
        records = Records.open(tmp_path / "run" / "records", task=task)
        episodes, table = records.episodes(), records.header.table
        assert episodes.masks["slot"].shape == (3, 12, 6, slots)
        op, slot, blueprint = episodes.actions.flatten(0, 1).T
        rows, used = torch.arange(36), table.relevance[op]
        assert bool(used[:, 2].any()), "something was germinated"
        assert bool(episodes.masks["op"].flatten(0, 1)[rows, op].all())
        assert bool((episodes.masks["slot"].flatten(0, 1)[rows, op, slot] | ~used[:, 1]).all())
        assert bool((episodes.masks["blueprint"].flatten(0, 1)[rows, slot, blueprint] | ~used[:, 2]).all())
    with pytest.raises(BadValueError, match="differ in table, layout"):
        Records.open(tmp_path / "run" / "records", several_tasks=True)


def test_the_command(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--record` may be given with `--resume`, which takes no other setting."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "copy")
    shutil.rmtree("copy/run/checkpoints/round-00004")
    main(["train", "--resume", "copy/run", "--record", "copy/records"])
    assert same(Records.open("copy/records").episodes(), Records.open(whole / "records").episodes())
    task = ["--task", config().task, "--rounds", "1", "--hosts", "2", "--members", "1"]
    main(["train", *task, "--out", "run", "--record", "run/records"])
    assert len(Records.open("run/records")) == 1
