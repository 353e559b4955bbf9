"""The loop of growth: what is offered works, what is seen is alive, what is paid adds up, what is stopped goes on."""

import functools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from simic.training.tiny import NAME, make_runner, play, purpose_of, tiny_task, varies
from torch import Tensor

from esper.karn import read_run
from esper.karn.lines import StageEvent
from esper.leyline import COOLDOWN_STAGES, BadValueError, LifecycleOp, SeedStage, derive_seed, head_preset
from esper.simic.agent import PPOAgent, load_agent, save_agent
from esper.simic.agent.policy import LearnedPolicy, fit_policy
from esper.simic.evaluation.arena import PolicyPlayer
from esper.simic.rewards import GammaMismatchError, RewardConfig
from esper.simic.training.collect import RoundCollector, action_draws
from esper.simic.training.config import TrainConfig, growth_ppo
from esper.simic.training.episode import EpisodeRunner, IllegalActionError, apply_action, play_episode
from esper.simic.training.hosts import PURPOSES, Groups, host_seed
from esper.simic.training.run_folder import TelemetryState
from esper.simic.training.trainer import Trainer
from esper.tamiyo import NetworkConfig
from esper.tamiyo.policies import HeuristicTamiyo, RandomCommitPolicy, RandomPolicy, WaitPolicy
from esper.tolaria import HostFleet, get_task


def config(**changes: object) -> TrainConfig:
    """A run of a few small rounds."""
    tiny_task()
    return replace(TrainConfig(task=NAME, rounds=3, hosts=6, members=2), **changes)  # type: ignore[arg-type]  # by name


# -- who begins how ---------------------------------------------------------------------------------------------------


def test_groups() -> None:
    groups = Groups.of(8, 3)
    assert (groups.count, groups.hosts, groups.grown, groups.envs) == (2, 8, 6, [0, 1, 2, 4, 5, 6])
    assert groups.spread([5, 9]) == [5, 5, 5, 5, 9, 9, 9, 9]
    values = torch.arange(8)
    assert groups.grown_of(values).tolist() == [0, 1, 2, 4, 5, 6]
    assert groups.control_of(values).tolist() == [3, 3, 3, 7, 7, 7]
    with pytest.raises(BadValueError, match="9 hosts cannot be divided into groups of 3"):
        Groups.of(9, 3)


def test_groups_without_controls() -> None:
    """Every env is grown, and its own control."""
    groups = Groups(2, 3, controls=False)
    assert (groups.hosts, groups.grown, groups.envs) == (6, 6, [0, 1, 2, 3, 4, 5])
    assert groups.spread([5, 9]) == [5, 5, 5, 9, 9, 9]
    values = torch.arange(12).view(6, 2)
    assert torch.equal(groups.grown_of(values), values)
    assert torch.equal(groups.control_of(values), values)


def test_purposes_never_share_a_host() -> None:
    """Host seeds of training, tuning, evaluation, final and recording come from disjoint ranges, in this order: their
    numbers are in published results."""
    seeds = {purpose: {host_seed(purpose, 0, r, g) for r in range(20) for g in range(20)} for purpose in PURPOSES}
    assert all(len(found) == 400 for found in seeds.values())
    assert len(set().union(*seeds.values())) == 2000
    order = ["training", "tuning", "evaluation", "final", "recording"]
    assert all(seed // 2**60 == order.index(purpose) for purpose, found in seeds.items() for seed in found)
    assert all(purpose_of(seed) == purpose for purpose, found in seeds.items() for seed in found)


@pytest.mark.invariant(13)
def test_draws_are_a_function_of_seed_round_and_env() -> None:
    """The number of envs does not change the draws of any one env."""
    few, many = (action_draws(1, "training", [(2, env) for env in range(n)], 4, 2) for n in (3, 5))
    assert torch.equal(few, many[:, :3])
    assert not torch.equal(few, action_draws(1, "training", [(3, env) for env in range(3)], 4, 2))


# -- what is offered works --------------------------------------------------------------------------------------------


@functools.cache
def random_episodes(preset: str) -> tuple[EpisodeRunner, list[Tensor], list[Tensor]]:
    """A runner, and the features and actions of each step of three random episodes."""
    runner, rows, actions = make_runner(4, 3, preset=preset), list[Tensor](), list[Tensor]()
    for rng_seed in range(3, 6):  # these use every op
        views, chosen, _ = play(runner, RandomPolicy(runner.table), rng_seed)
        rows += [view.features for view in views]
        actions += chosen
    return runner, rows, actions


@pytest.mark.invariant(7)
@pytest.mark.default_cases("full")
@pytest.mark.parametrize("preset", ["core", "full"])
def test_every_action_that_masks_allow_succeeds(preset: str) -> None:
    """Random legal actions are never refused, and they use every op of the preset."""
    runner, _, actions = random_episodes(preset)
    used = {LifecycleOp(op) for step in actions for op in step[:, 0].tolist()}
    assert used == set(runner.preset.ops)


def test_what_masks_forbid_is_refused() -> None:
    """A policy that does not look at its masks is stopped, with the reason."""
    runner = make_runner()
    runner.begin([1, 2, 3])
    with pytest.raises(IllegalActionError, match="ADVANCE in r1c0"):
        apply_action(runner.fleet, 0, [int(LifecycleOp.ADVANCE), 0, 0], runner.table, runner.slots)


@pytest.mark.invariant(12)
def test_who_waits_has_no_gain() -> None:
    """The gain of a host that only waits is exactly 0."""
    runner = make_runner()
    _, _, results = play(runner, WaitPolicy(runner.table))
    assert all(float(result.gain.abs().max()) == 0 for result in results)
    last = results[-1]
    assert last.hardened_accuracy is not None
    assert torch.equal(last.hardened_accuracy, last.hardened_control)  # type: ignore[arg-type]  # it is the end
    assert all(result.hardened_accuracy is None for result in results[:-1])


@pytest.mark.parametrize("kind", ["random-commit", "heuristic"])
def test_rules_run_through_an_episode(kind: str) -> None:
    runner = make_runner()
    table = runner.table
    policy = RandomCommitPolicy(table, 12) if kind == "random-commit" else HeuristicTamiyo(table, runner.slots)
    _, actions, results = play(runner, policy)
    if kind == "random-commit":
        assert float((results[-1].fossil_parameters > 0).float().mean()) > 0
    assert len(actions) == 12


@pytest.mark.slow
def test_an_untrained_policy_commits_often_enough_to_learn() -> None:
    """In at least a fifth of its episodes, before any learning."""
    tiny_task()
    fast = replace(get_task("digits_blind"), batches_per_step=1, batch=8, calibration_size=16, validation_size=100)
    groups = Groups(30, 1)
    runner = EpisodeRunner(HostFleet(fast, groups.hosts), groups, head_preset("core"))
    committed = []
    for rng_seed in range(2):
        agent = PPOAgent(runner.table, runner.layout, config().agent_config(fast), rng_seed=rng_seed)
        seeds, positions = list(range(30)), [(0, env) for env in range(30)]
        draws = action_draws(rng_seed, "training", positions, fast.steps, len(runner.table))
        player = PolicyPlayer(runner, LearnedPolicy(agent, runner.slots), seeds, draws)
        committed += (play_episode(runner, player.act, player.on_step).fossil_parameters > 0).tolist()
    assert sum(committed) / len(committed) >= 0.2


# -- what is seen -----------------------------------------------------------------------------------------------------


@pytest.mark.invariant(10)
def test_every_column_lives() -> None:
    """The observation is finite, of fixed size, and every column varies over random episodes."""
    runner, rows, _ = random_episodes("full")
    agent = PPOAgent(runner.table, runner.layout, replace(growth_ppo(), steps=12), total_updates=3)
    collector = RoundCollector([runner], agent, RewardConfig(), rng_seed=0)
    [record] = collector.collect(0)  # only where rewards are paid there is a potential
    seen = torch.cat([*rows, record.features.flatten(0, 1)])
    assert bool(seen.isfinite().all())
    shared = runner.layout.columns()
    alive = torch.zeros(len(runner.layout.column_names), dtype=torch.bool)
    for statistic in range(len(alive)):
        alive[statistic] = bool(varies(seen[:, shared == statistic].flatten().unsqueeze(1)))
    dead = [name for name, lives in zip(runner.layout.column_names, alive.tolist(), strict=True) if not lives]
    # An action that is offered succeeds, unless the governor undoes it. Hosts of one task have all their slots.
    assert dead == ["last_succeeded", "slot.present"]


@pytest.mark.requirement(95)
def test_a_panic_undoes_the_action_and_pays_the_penalty() -> None:
    """The transition whose training panicked ends its segment with the penalty."""
    runner = make_runner()
    agent = PPOAgent(runner.table, runner.layout, replace(growth_ppo(), steps=12), total_updates=3)
    collector = RoundCollector([runner], agent, RewardConfig(), rng_seed=4)
    train, broken = runner.fleet.train_step, 1
    calls = iter(range(100))

    def faulty() -> torch.Tensor:
        if next(calls) == 2:
            runner.fleet.host.weights.matrix.data[broken] = float("nan")
        return train()

    runner.fleet.train_step = faulty  # type: ignore[method-assign]  # a fault at the third step
    [record] = collector.collect(0)
    assert len(record.symptoms) == 1
    ends = collector.buffer.ends[broken]
    assert ends.nonzero().flatten().tolist() == [2, 11], "later steps are a new segment"
    assert float(collector.buffer.rewards[broken, 2]) < -5
    assert float(collector.buffer.rewards[0].min()) > float(collector.buffer.rewards[broken, 2])
    succeeded = runner.layout.host.index("last_succeeded")
    seen = record.features[:, broken, succeeded]
    assert seen.tolist() == [1.0, 1.0, 1.0, 0.0, *[1.0] * 8], "the policy is told"


def test_the_control_is_the_critics_alone() -> None:
    """Changing what is known of the control changes no action probability."""
    runner = make_runner()
    views, _, _ = play(runner, RandomPolicy(runner.table))
    agent = PPOAgent(runner.table, runner.layout, growth_ppo())
    features = views[5].features
    other = features.clone()
    other[:, -len(runner.layout.critic) :] += 1.0
    hidden_state = agent.network.initial_state(len(features))
    draws = torch.full((len(features), len(runner.table)), 0.5)
    one, value, _ = agent.act(features, views[5].masks, hidden_state, uniform=draws)
    two, changed, _ = agent.act(other, views[5].masks, hidden_state, uniform=draws)
    assert torch.equal(one.log_probs, two.log_probs)
    assert not torch.equal(value, changed)


def test_the_critic_looks_back() -> None:
    """After a round it knows at every step what the control came to, and its values are those of this knowledge; what
    was chosen stays what it was."""
    runner = make_runner()
    agent = PPOAgent(runner.table, runner.layout, replace(growth_ppo(), steps=12), total_updates=3)
    collector = RoundCollector([runner], agent, RewardConfig(), rng_seed=4)
    collector.collect(0)  # statistics of observations, so that columns are on a common scale
    [record] = collector.collect(1)
    end = record.features[:, :, -len(runner.layout.critic) + runner.layout.critic.index("control_end")]
    control = record.control_accuracies[-1].float() / 100
    assert len(control.unique()) > 1
    torch.testing.assert_close(end, control.expand(12, -1))
    buffer, hidden_state = collector.buffer, agent.network.initial_state(6)
    for step in range(12):
        masks = {name: mask[:, step] for name, mask in buffer.masks.items()}
        core, after = agent.network.step(agent.network.encode(buffer.observations[:, step]).trunk, hidden_state)
        encoded = agent.network.encode(buffer.observations[:, step])
        value = agent.values_of(agent.network.value(core, encoded), buffer.tasks)
        torch.testing.assert_close(buffer.values[:, step], value, rtol=1e-4, atol=1e-4)
        actions = buffer.actions[:, step]
        decision = agent.network.decide(core, encoded, masks, buffer.epsilon, actions=actions)
        torch.testing.assert_close(buffer.log_probs[:, step], decision.log_probs, rtol=1e-4, atol=1e-4)
        hidden_state = after
    assert agent.update(buffer).behaviour_gap < 1e-4


# -- what is paid -----------------------------------------------------------------------------------------------------


def test_rewards_add_up_to_the_objective() -> None:
    """With γ = 1 and no panic, an episode's rewards sum to the hardened gain minus the rent of the fossils."""
    runner = make_runner()
    agent = PPOAgent(runner.table, runner.layout, replace(growth_ppo(), steps=12), total_updates=3)
    [record] = RoundCollector([runner], agent, RewardConfig(), rng_seed=4).collect(0)
    assert len(record.symptoms) == 0
    torch.testing.assert_close(record.rewards.sum(0), record.objective.float(), rtol=1e-4, atol=1e-3)
    assert float(record.rewards.abs().sum()) > 0


@pytest.mark.slow
def test_the_price_of_commits_begins_in_mid_run(tmp_path: Path) -> None:
    """Of two rounds the second pays for its commits, and no evaluation does. A policy that likes to act, so that there
    are some."""
    tiny_task()
    reward = RewardConfig(commit_price=2.0, price_after=0.5)
    eager = replace(growth_ppo(), network=NetworkConfig(first_bias=(-1.0, 1.0, 0.0, -2.0, 3.0, 2.0)))
    settings = TrainConfig(task=NAME, rounds=2, hosts=16, preset="core", ppo=eager, reward=reward)
    trainer = Trainer(settings, tmp_path / "run")
    with trainer.folder:
        for paid in (0.0, 2.0):
            (record,) = trainer.run_round()
            commits = (record.actions[..., 0] == int(LifecycleOp.FOSSILIZE)).sum(0)
            assert bool(commits.any())
            price = paid * commits * (commits + 1) / 2
            assert torch.equal(record.parts["price"].sum(0), -price)
            assert torch.allclose(record.rewards.sum(0), (record.objective - price).float(), atol=1e-3)


@pytest.mark.requirement(1)
def test_gamma_is_one_number() -> None:
    """A trainer with two gammas is refused before the first step."""
    with pytest.raises(GammaMismatchError, match=r"0\.995"):
        config(reward=RewardConfig(gamma=0.995))


def test_a_panic_leaves_nothing_of_the_broken_host_to_see() -> None:
    """What was measured of a TRAINING seed in a host that blew up is forgotten with it."""
    runner = make_runner()
    runner.begin([1, 2, 3])
    wait = torch.zeros((runner.groups.grown, 3), dtype=torch.long)
    sow = wait.clone()
    sow[0] = torch.tensor([int(LifecycleOp.GERMINATE), 0, 2])
    for actions in (sow, wait, wait):
        runner.view()
        runner.step(actions)
    runner.view()
    runner.fleet.rate_scale[0] = 1e20
    result = runner.step(wait)
    assert result.panics.tolist() == [True, *[False] * 5]
    assert result.symptoms[0]
    assert bool(runner.view().features.isfinite().all())


# -- runs -------------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, object]]:
    """Metrics without what depends on the clock."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "timing"} for row in found]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    """Bit for bit: metrics, events, weights."""
    whole = Trainer(config(), tmp_path / "whole")
    whole.run(progress=False)
    part = Trainer(config(), tmp_path / "part")
    with part.folder:
        part.run_round()
        part.folder.events.write(kind="stage", half="a round that was never finished")
    again = Trainer(config(), tmp_path / "part", resume=True)
    assert again.round == 1
    again.run(progress=False)
    assert lines(tmp_path / "part" / "metrics.jsonl") == lines(tmp_path / "whole" / "metrics.jsonl")
    assert (tmp_path / "part" / "events.jsonl").read_text() == (tmp_path / "whole" / "events.jsonl").read_text()
    for mine, other in zip(whole.agent.network.parameters(), again.agent.network.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [path.name for path in (tmp_path / "part").glob("events.jsonl.tail-*")], "what was cut off is kept aside"


def test_other_conditions_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on under another torch, or with other kernels, may differ in its last bits: it says so."""
    part = Trainer(config(), tmp_path / "run")
    with part.folder:
        part.run_round()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    with pytest.warns(RuntimeWarning, match=r"not bit for bit: cpu \S+ → ABACUS"):
        again = Trainer(config(), tmp_path / "run", resume=True)
    with again.folder:
        assert again.round == 1


def test_the_log_tells_every_life(tmp_path: Path) -> None:
    """Each seed's stages in order, under one blueprint; and an episode per grown env and round."""
    trainer = Trainer(config(rounds=1, hosts=18), tmp_path / "run")
    trainer.run(progress=False)
    run = read_run(tmp_path / "run")
    assert len(run.episodes[0]) == 12
    lives: dict[tuple[int, str], list[StageEvent]] = {}
    for change in run.changes:
        lives.setdefault((change.env, change.slot), []).append(change)
    assert lives
    for life in lives.values():
        assert life[0].source is SeedStage.DORMANT
        assert all(one.target is other.source for one, other in pairwise(life))
        for one, other in pairwise(life):
            if other.cause != "germinate" and other.source not in COOLDOWN_STAGES:
                assert one.blueprint == other.blueprint is not None


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    Trainer(config(), tmp_path / "run").folder.__exit__(None, None, None)
    with pytest.raises(BadValueError, match="in use"):
        Trainer(config(), tmp_path / "run")
    with pytest.raises(BadValueError, match="no run folder"):
        Trainer(config(), tmp_path / "nothing", resume=True)


def test_a_policy_works_on_hosts_with_other_slots(tmp_path: Path) -> None:
    """A checkpoint is refused for other heads or columns, never for the number of slots."""
    runner = make_runner()
    agent = PPOAgent(runner.table, runner.layout, growth_ppo(), rng_seed=derive_seed(1) % 2**62)
    policy = LearnedPolicy(agent, runner.slots)
    _, actions, _ = play(runner, policy)
    assert actions[0].shape == (6, 3)


@pytest.mark.slow
def test_a_policy_with_another_critic_acts_all_the_same(tmp_path: Path) -> None:
    """Checkpoints from before the critic had all of its columns: who only acts never asks it."""
    runner = make_runner()
    layout = replace(runner.layout, critic=runner.layout.critic[:2])
    config = replace(growth_ppo(), network=NetworkConfig(head_gain=1.0))
    agent = PPOAgent(runner.table, layout, config, rng_seed=5)
    save_agent(agent, tmp_path / "old", {"watching": TelemetryState()})
    loaded = fit_policy(load_agent(tmp_path / "old")[0], runner.slots)
    one, other = (play(runner, policy)[1] for policy in (LearnedPolicy(agent, runner.slots), loaded))
    assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))
