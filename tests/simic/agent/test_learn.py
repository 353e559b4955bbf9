"""`learn` on Gymnasium environments: spaces, masks, truncation, evaluation, keeping and going on."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation

from esper.leyline import BadValueError, CheckpointError
from esper.simic.agent import Learned, LearnProgress, NotFiniteError, PPOConfig, SpaceError, learn
from esper.simic.agent.checkpoint import agent_tensors, restore_tensors
from esper.simic.agent.collector import RolloutCollector
from esper.simic.agent.environments import LocalBatch
from esper.simic.agent.learning import RewardScale
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.spaces import SpaceCodec
from esper.tamiyo import EmptyMaskError, NetworkConfig
from esper.tamiyo.memory import MemoryKind

SMALL = PPOConfig(NetworkConfig(encoder=8, hidden=8, head=8), steps=8, epochs=2, minibatches=2)
Made = Callable[[], gym.Env[Any, Any]]


class Bandit(gym.Env[Any, Any]):
    """One step, or as many as `length`; the reward is the number of the action (the sum of its components)."""

    def __init__(
        self,
        actions: spaces.Space[Any] | None = None,
        seen: spaces.Space[Any] | None = None,
        mask: Any = None,
        how: str = "info",
        length: int = 1,
        truncates: bool = False,
        broken: str = "",
    ) -> None:
        self.action_space = actions if actions is not None else spaces.Discrete(3)
        self.observation_space = seen if seen is not None else spaces.Box(-1, 1, (2,), np.float32)
        self.mask, self.how, self.length, self.truncates, self.broken = mask, how, length, truncates, broken
        self.taken: list[Any] = []
        if how == "method":
            self.action_masks = lambda: self.mask

    def _see(self) -> Any:
        if isinstance(self.observation_space, spaces.Discrete):
            return self.observation_space.start + self.time % self.observation_space.n
        value = np.full(self.observation_space.shape or (), 0.1 * self.time, np.float32)
        return value * np.nan if self.broken == "observation" and self.time else value

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.mask} if self.how == "info" and self.mask is not None else {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._see(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        self.time += 1
        done = self.time >= self.length
        reward = float("nan") if self.broken == "reward" else float(np.sum(action))
        return self._see(), reward, done and not self.truncates, done and self.truncates, self._info()


def collect(make: Made, config: PPOConfig = SMALL, n: int = 4) -> tuple[RolloutCollector, list[Bandit]]:
    """A collector after one round, and its environments."""
    envs = LocalBatch([make() for _ in range(n)])
    agent = PPOAgent(envs.codec.table, envs.codec.layout, config, total_updates=10)
    collector = RolloutCollector(envs, agent, [])
    envs.begin(range(n), range(n))
    collector.collect()
    return collector, [env for env in envs.envs if isinstance(env, Bandit)]


# -- spaces and masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bandit(),
        lambda: Bandit(spaces.Discrete(3, start=5)),
        lambda: Bandit(spaces.MultiDiscrete(np.array([2, 3]))),
        lambda: Bandit(spaces.MultiDiscrete(np.array([2, 3]), start=np.array([1, -1]))),
        lambda: Bandit(seen=spaces.Discrete(4)),
        lambda: Bandit(seen=spaces.Discrete(4, start=-2), length=5),
        lambda: Bandit(seen=spaces.Box(-1, 1, (2, 3), np.float64), length=3),
        lambda: Bandit(seen=spaces.Box(-1, 1, (), np.float32)),
    ],
)
def test_learns_on_every_kind_of_space(make: Made) -> None:
    """Actions that reach the environment lie in its space; offsets and shapes are kept."""
    learned = learn(make, total_steps=64, n_envs=4, config=SMALL, progress=False)
    assert len(learned.history) == 2
    action, _ = learned.act(make().observation_space.sample())
    assert make().action_space.contains(action)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bandit(spaces.Box(-1, 1, (2,), np.float32)),
        lambda: Bandit(spaces.MultiDiscrete(np.array([[2, 2]]))),
        lambda: Bandit(spaces.Dict({"a": spaces.Discrete(2)})),
    ],
)
def test_refuses_other_spaces(make: Made) -> None:
    with pytest.raises(SpaceError, match="allowed"):
        learn(make, total_steps=64, config=SMALL, progress=False)


@pytest.mark.parametrize(
    "seen",
    [
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,), np.float32)}),
        spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]),
        spaces.MultiDiscrete(np.array([2, 3])),
        spaces.MultiBinary(3),
    ],
)
def test_refuses_nested_observations(seen: spaces.Space[Any]) -> None:
    """The error names the space and the remedy, which works."""

    class Nested(Bandit):
        def _see(self) -> Any:
            return seen.sample()

    with pytest.raises(SpaceError, match=rf"{re.escape(str(seen))}; allowed: Box, Discrete; .*FlattenObservation"):
        learn(lambda: Nested(seen=seen), total_steps=64, config=SMALL, progress=False)
    learn(lambda: FlattenObservation(Nested(seen=seen)), total_steps=16, n_envs=2, config=SMALL, progress=False)


@pytest.mark.parametrize(
    "seen",
    [
        spaces.Box(0, 255, (84, 84, 3), np.uint8),
        spaces.Box(0, 1, (4, 8, 8), np.float32),
        spaces.Box(0, 255, (8, 8), np.uint8),
        spaces.Box(0, 1, (2, 4, 8, 8), np.float32),
    ],
)
def test_refuses_images(seen: spaces.Box) -> None:
    """The error names the shape and the remedy, which works."""
    with pytest.raises(SpaceError, match=rf"shape {re.escape(str(seen.shape))}.* images.*FlattenObservation"):
        learn(lambda: Bandit(seen=seen), total_steps=64, config=SMALL, progress=False)
    learn(lambda: FlattenObservation(Bandit(seen=seen)), total_steps=16, n_envs=2, config=SMALL, progress=False)


def test_refuses_environments_that_differ() -> None:
    sizes = iter([3, 3, 4, 4])
    with pytest.raises(SpaceError, match="same spaces"):
        learn(lambda: Bandit(spaces.Discrete(next(sizes))), total_steps=64, n_envs=4, config=SMALL, progress=False)


@pytest.mark.parametrize("how", ["info", "method"])
def test_masks_are_respected(how: str) -> None:
    _, envs = collect(lambda: Bandit(mask=np.array([True, False, True]), how=how))
    taken = [action for env in envs for action in env.taken]
    assert set(taken) == {0, 2}


@pytest.mark.parametrize(
    "mask", [(np.array([1, 0]), np.array([0, 1, 1])), np.array([1, 0, 0, 1, 1]), [[1, 0], [0, 1, 1]]]
)
def test_masks_of_components(mask: Any) -> None:
    """One array per component, or all of them in one."""
    _, envs = collect(lambda: Bandit(spaces.MultiDiscrete(np.array([2, 3])), mask=mask))
    taken = np.array([action for env in envs for action in env.taken])
    assert set(taken[:, 0]) == {0}
    assert set(taken[:, 1]) == {1, 2}


def test_an_empty_mask_names_env_and_head() -> None:
    with pytest.raises(EmptyMaskError, match=r"action0.*env 0"):
        collect(lambda: Bandit(mask=np.zeros(3, bool)))


def test_a_mask_of_the_wrong_size() -> None:
    with pytest.raises(SpaceError, match="mask of 2 entries"):
        collect(lambda: Bandit(mask=np.ones(2, bool)))


# -- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(11)
def test_termination_has_no_bootstrap_and_truncation_has_one() -> None:
    """A truncated episode bootstraps from the value of its last observation."""
    for truncates in (False, True):
        collector, _ = collect(lambda: Bandit(length=3, truncates=truncates))  # noqa: B023
        buffer = collector.buffer
        assert buffer.ends[:, :7].tolist() == [[False, False, True, False, False, True, False]] * 4
        assert bool((buffer.bootstraps[:, 2] != 0).all()) == truncates
        assert bool((buffer.bootstraps[:, [0, 1, 3, 4]] == 0).all())
        assert bool((buffer.bootstraps[:, 7] != 0).all()), "the round is cut inside an episode"


@pytest.mark.requirement(11)
def test_the_bootstrap_sees_the_last_observation_with_the_carried_memory() -> None:
    """By hand: one more network step from the hidden state after the last action."""
    collector, _ = collect(lambda: Bandit(length=4, truncates=True))
    agent, buffer = collector.agent, collector.buffer
    network, hidden_state = agent.network, agent.network.initial_state(4)
    with torch.no_grad():
        for step in range(4):
            _, hidden_state = network.step(network.encode(buffer.observations[:, step]).trunk, hidden_state)
        last = torch.full((4, 2), 0.4)  # time 4
        encoded = network.encode(last)  # statistics still are mean 0, deviation 1
        core, _ = network.step(encoded.trunk, hidden_state)
        expected = agent.values_of(network.value(core, encoded), buffer.tasks)
    torch.testing.assert_close(buffer.bootstraps[:, 3], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.requirement(11)
def test_a_cut_round_is_bootstrapped_with_the_memory_it_carries() -> None:
    """The round ends within an episode. The bootstrap is one more step of the network from the memory after the last
    action, not from an empty one."""
    collector, _ = collect(lambda: Bandit(length=100))
    agent, buffer = collector.agent, collector.buffer
    network, empty = agent.network, agent.network.initial_state(4)
    hidden_state = empty
    with torch.no_grad():
        for step in range(8):
            _, hidden_state = network.step(network.encode(buffer.observations[:, step]).trunk, hidden_state)
        encoded = network.encode(torch.full((4, 2), 0.8))  # time 8; statistics still are mean 0, deviation 1
        expected, without = (
            agent.values_of(network.value(network.step(encoded.trunk, start)[0], encoded), buffer.tasks)
            for start in (hidden_state, empty)
        )
    torch.testing.assert_close(buffer.bootstraps[:, 7], expected, rtol=1e-5, atol=1e-6)
    assert float((expected - without).abs().min()) > 1e-2


def test_memory_is_empty_after_an_episode() -> None:
    collector, _ = collect(lambda: Bandit(length=8))
    assert all(float(part.abs().max()) == 0 for part in collector.hidden_state)
    collector, _ = collect(lambda: Bandit(length=9))
    assert all(float(part.abs().max()) > 0 for part in collector.hidden_state)


@pytest.mark.requirement(5)
def test_statistics_take_in_each_round_once_and_freeze() -> None:
    """Statistics update once per round, before the update, until the configured share of the run."""
    collector, _ = collect(lambda: Bandit(length=4), replace(SMALL, freeze_after=0.2))
    agent = collector.agent
    assert agent.observations.statistics.count.tolist() == [32, 32]
    for _ in range(2):
        agent.update(collector.buffer)
        collector.collect()
    assert agent.progress == 0.2
    assert agent.observations.statistics.count.tolist() == [64, 64], "the third round found them frozen"


@pytest.mark.parametrize("broken", ["reward", "observation"])
def test_what_is_not_finite_is_named(broken: str) -> None:
    with pytest.raises(NotFiniteError, match=r"env"):
        collect(lambda: Bandit(length=4, broken=broken))


# -- the door ---------------------------------------------------------------------------------------------------------


def test_finds_the_best_arm_with_the_same_result_every_time() -> None:
    config = replace(SMALL, steps=16, epochs=6, rate=1e-2)
    first, second = (learn(Bandit, total_steps=2048, n_envs=4, config=config, progress=False) for _ in range(2))
    assert first.evaluate(5, seed=1) == [2.0] * 5
    assert [m.approx_kl for m in first.history] == [m.approx_kl for m in second.history]
    assert first.returns == second.returns


def test_evaluation_follows_from_seed_and_number() -> None:
    """Not from how many episodes run at once, nor from the agent's own stream."""
    learned = learn(lambda: Bandit(length=3), total_steps=64, n_envs=4, config=SMALL, progress=False)
    sampled = learned.evaluate(20, seed=3, greedy=False)
    assert sampled == learned.evaluate(20, seed=3, greedy=False)
    assert sampled[:5] == learned.evaluate(5, seed=3, greedy=False)
    assert len(set(sampled)) > 1


def test_comes_back_from_disk(tmp_path: Path) -> None:
    learned = learn(Bandit, total_steps=64, n_envs=4, config=SMALL, progress=False)
    learned.save(tmp_path / "policy")
    again = Learned.load(tmp_path / "policy", Bandit)
    assert again.evaluate(5, seed=1, greedy=False) == learned.evaluate(5, seed=1, greedy=False)
    with pytest.raises(BadValueError, match="make_env"):
        Learned.load(tmp_path / "policy").evaluate(1, seed=0)
    with pytest.raises(SpaceError):
        Learned.load(tmp_path / "policy", lambda: Bandit(spaces.Discrete(7)))
    (tmp_path / "policy" / "agent.json").unlink()
    with pytest.raises(CheckpointError):
        Learned.load(tmp_path / "policy")


@pytest.mark.parametrize("no", [False, np.False_])
def test_a_callback_sees_every_update_and_can_stop(tmp_path: Path, no: bool) -> None:
    """It may evaluate and save, which changes nothing of the training."""
    seen: list[LearnProgress] = []

    def callback(state: LearnProgress) -> bool | None:
        seen.append(state)
        state.learned.evaluate(2, seed=0, greedy=False)
        state.learned.save(tmp_path / str(len(seen)))
        return no if len(seen) == 3 else (None, True)[len(seen) % 2]

    whole = learn(Bandit, total_steps=5 * 32, n_envs=4, config=SMALL, progress=False)
    stopped = learn(Bandit, total_steps=5 * 32, n_envs=4, config=SMALL, progress=False, callback=callback)
    assert [state.steps for state in seen] == [32, 64, 96]
    assert [state.metrics for state in seen] == stopped.history == whole.history[:3]
    assert seen[0].mean_return == np.mean([total for _, total in whole.returns[:32]])
    assert all(state.learned is stopped for state in seen)
    assert Learned.load(tmp_path / "2").agent.updates == 2


def test_training_continues_from_disk(tmp_path: Path) -> None:
    """Episodes end with the rounds, so the environments have no state to lose: a training that was stopped, saved,
    loaded and continued equals one that was not, in weights, moments, normalisers and counters."""

    def train(**others: Any) -> Learned:
        return learn(lambda: Bandit(length=8), total_steps=6 * 32, n_envs=4, progress=False, **others)

    whole, stopped = train(config=SMALL), train(config=SMALL, callback=lambda state: state.steps < 64)
    assert (stopped.agent.updates, stopped.agent.total_updates) == (2, 6)
    stopped.save(tmp_path / "policy")
    loaded = Learned.load(tmp_path / "policy")
    again = train(start=loaded, config=SMALL, seed=5)
    assert again is loaded
    expected, found = (agent_tensors(learned.agent) for learned in (whole, again))
    assert {name for name in expected if not torch.equal(expected[name], found[name])} == set()
    for name, value in whole.reward_statistics.state_dict().items():
        assert torch.equal(value, again.reward_statistics.state_dict()[name])
    assert (again.agent.updates, again.agent.progress) == (6, 1.0)
    assert (again.history, again.returns) == (whole.history[2:], whole.returns[8:])


def test_training_that_cannot_continue_is_refused(tmp_path: Path) -> None:
    """Nothing left to do, another configuration, other spaces, damaged statistics of rewards."""
    done = learn(Bandit, total_steps=64, n_envs=4, config=SMALL, progress=False)
    with pytest.raises(BadValueError, match=r"total_steps 64 .* 96 or more \(3 rounds of 4 × 8; 2 are done\)"):
        learn(Bandit, total_steps=64, n_envs=4, start=done, progress=False)
    with pytest.raises(BadValueError, match="omit config"):
        learn(Bandit, total_steps=96, n_envs=4, start=done, config=replace(SMALL, rate=1.0), progress=False)
    with pytest.raises(SpaceError, match="same spaces"):
        learn(lambda: Bandit(spaces.Discrete(7)), total_steps=96, n_envs=4, start=done, progress=False)
    with pytest.raises(BadValueError, match="not finite, or below 0"):
        RewardScale(0.0, -1.0, 3.0)


@pytest.mark.parametrize(("total_steps", "n_envs"), [(3, 8), (64, 0)])
def test_refuses_runs_shorter_than_a_round(total_steps: int, n_envs: int) -> None:
    with pytest.raises(BadValueError):
        learn(Bandit, config=SMALL, progress=False, total_steps=total_steps, n_envs=n_envs)


@pytest.mark.parametrize("observation", [2, 6, -1])
def test_a_category_that_the_space_lacks_is_refused(observation: int) -> None:
    """One below the first must not count from the end."""
    codec = SpaceCodec(3, 3, 3, (2,), (0,), True)
    row = np.full(3, 7.0, np.float32)
    with pytest.raises(SpaceError, match=r"the space has 3 … 5"):
        codec.write_observation(observation, row)
    assert row.tolist() == [7.0] * 3
    codec.write_observation(5, row)
    assert row.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(("memory", "layers"), [("off", 1), ("lstm", 2)])
def test_other_memories_learn_and_come_back(memory: MemoryKind, layers: int, tmp_path: Path) -> None:
    """A feed-forward policy and a deeper LSTM: trained, saved and loaded; no other network reads their file."""
    network = replace(SMALL.network, memory=memory, memory_layers=layers)
    learned = learn(
        lambda: Bandit(length=3), total_steps=64, n_envs=4, config=replace(SMALL, network=network), progress=False
    )
    learned.save(tmp_path / "policy")
    again = Learned.load(tmp_path / "policy", lambda: Bandit(length=3))
    assert again.evaluate(3, seed=1, greedy=False) == learned.evaluate(3, seed=1, greedy=False)
    assert again.agent.config.network == network
    parts = [part.shape for part in again.act(np.zeros(2))[1]]
    assert parts == [(1, 8 * layers if memory == "lstm" else 0)] * 2
    other = PPOAgent(learned.agent.table, learned.agent.layout, SMALL)
    with pytest.raises(CheckpointError, match="tensor"):
        restore_tensors(other, agent_tensors(learned.agent), "policy")
    text = (tmp_path / "policy" / "agent.json").read_text()
    assert text.count(f'"memory_layers": {layers}') == 1
    (tmp_path / "policy" / "agent.json").write_text(text.replace(f'"memory_layers": {layers}', '"memory_layers": 3'))
    with pytest.raises(CheckpointError, match="changed"):
        Learned.load(tmp_path / "policy")
    with pytest.raises(BadValueError, match="start is trained further with its own config"):
        learn(lambda: Bandit(length=3), total_steps=96, n_envs=4, config=SMALL, start=again, progress=False)


def test_environments_are_closed_when_one_fails() -> None:
    """An evaluation that ends in an error leaves none of them open."""
    closed = []

    class Failing(Bandit):
        def step(self, action: Any) -> Any:
            raise ValueError("broken")

        def close(self) -> None:
            closed.append(1)

    learned = learn(Bandit, total_steps=64, n_envs=2, config=SMALL, progress=False)
    learned.make_env = Failing
    with pytest.raises(ValueError, match="broken"):
        learned.evaluate(3, 0)
    assert len(closed) == 3
