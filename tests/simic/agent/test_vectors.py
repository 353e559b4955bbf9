"""`learn` on Gymnasium's vectors: the same experience in every way to reset, and nothing learnt from steps that only
reset."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from light_envs import Walk
from torch import Tensor

from esper.leyline import BadValueError
from esper.simic.agent import Learned, PPOAgent, PPOConfig, SpaceError, learn
from esper.simic.agent.checkpoint import agent_tensors
from esper.simic.agent.collector import RolloutCollector
from esper.simic.agent.environments import EnvBatch
from esper.simic.agent.vectors import open_batch
from esper.tamiyo import EmptyMaskError, NetworkConfig

SMALL = PPOConfig(NetworkConfig(encoder=8, hidden=8, head=8), steps=8, epochs=2, minibatches=2)
Vector = VectorEnv[Any, Any, Any]


def vector(mode: AutoresetMode, kind: type[Any] = SyncVectorEnv, n: int = 4, **options: Any) -> Vector:
    """A vector of walks."""
    made: Vector = kind([partial(Walk, **options)] * n, autoreset_mode=mode)
    return made


def train(make_env: Any, **options: Any) -> Learned:
    """A few updates."""
    return learn(make_env, total_steps=4 * 32, config=SMALL, seed=3, progress=False, **options)


def same(one: Learned, other: Learned) -> bool:
    """Whether two trainings are equal to the bit, in weights, moments, statistics and episodes."""
    tensors, others = agent_tensors(one.agent), agent_tensors(other.agent)
    assert set(tensors) == set(others)
    scales = [each.reward_statistics.state_dict() for each in (one, other)]
    return (
        all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
        and all(torch.equal(value, scales[1][name]) for name, value in scales[0].items())
        and one.returns == other.returns
        and one.history == other.history
    )


def collect(make_env: Callable[[], Any], n: int | None = None) -> RolloutCollector:
    """A collector after one round."""
    envs = open_batch(make_env, n)
    agent = PPOAgent(envs.codec.table, envs.codec.layout, SMALL, total_updates=10)
    collector = RolloutCollector(envs, agent, [])
    envs.begin(range(envs.n), range(envs.n))
    collector.collect()
    envs.close()
    return collector


# -- equal experience -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_vector_gives_what_single_environments_give(mode: AutoresetMode) -> None:
    """To the bit: bootstraps of truncated episodes, masks, returns, statistics of observations and rewards."""
    single = train(Walk, n_envs=4)
    assert len(single.returns) > 20
    assert same(train(lambda: vector(mode)), single)


@pytest.mark.parametrize("masks", ["info", "method"])
def test_processes_give_what_this_one_gives(masks: str) -> None:
    make_env = partial(Walk, masks=masks)
    assert same(train(make_env, n_envs=2, processes=True), train(make_env, n_envs=2))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_async_equals_sync(mode: AutoresetMode) -> None:
    """The third mode is that of `processes`."""
    spawned = partial(AsyncVectorEnv, context="spawn")
    trained = [train(lambda kind=kind: vector(mode, kind, n=2)) for kind in (SyncVectorEnv, spawned)]
    assert same(*trained)


# -- steps that only reset --------------------------------------------------------------------------------------------


def rows(collector: RolloutCollector, values: Tensor) -> list[Tensor]:
    """Per env, the steps that its row holds."""
    return [row[:length] for row, length in zip(values, collector.buffer.lengths.tolist(), strict=True)]


def test_nothing_is_learnt_from_a_step_that_only_resets() -> None:
    """In NEXT_STEP, rows are shorter by the resets. Episodes begin at time 0, and end before the next one begins."""
    collector = collect(lambda: vector(AutoresetMode.NEXT_STEP))
    buffer = collector.buffer
    assert max(buffer.lengths.tolist()) < 8
    parts = (rows(collector, values) for values in (buffer.observations[..., 0], buffer.ends, buffer.masks["action0"]))
    for seen, ends, masks in zip(*parts, strict=True):
        begins = torch.cat([torch.tensor([True]), ends[:-1]])
        assert (seen[begins] == 0).all() and (seen[~begins] > 0).all()
        assert (seen.diff()[~ends[:-1]] == 1).all()
        assert torch.equal(masks[:, 0], seen % 2 == 0)
    assert collector.agent.observations.statistics.count.tolist() == [float(buffer.steps)] * 2
    assert float(collector.rewards.statistics.count) == buffer.steps
    learned = train(lambda: vector(AutoresetMode.NEXT_STEP))
    assert [metrics.behaviour_gap < 1e-4 for metrics in learned.history] == [True] * 4
    assert sum(metrics.steps for metrics in learned.history) < 128 == 4 * 32


def test_a_truncated_episode_bootstraps_from_its_last_observation() -> None:
    """In every mode, with the memory after the last action: by hand, for the first episode of each env."""
    for mode in AutoresetMode:
        collector = collect(lambda: vector(mode, masks="none"))  # noqa: B023
        buffer, network = collector.buffer, collector.agent.network
        for env in range(4):
            walk = Walk("none")
            walk.reset(seed=env)
            for action in buffer.actions[env, : walk.length, 0].tolist():
                last, *_ = walk.step(action)
            state = network.initial_state(1)
            with torch.no_grad():
                for seen in [*buffer.observations[env, : walk.length], torch.from_numpy(last)]:
                    encoded = network.encode(seen[None])
                    core, state = network.step(encoded.trunk, state)
                expected = collector.agent.values_of(network.value(core, encoded), torch.tensor([0]))
            torch.testing.assert_close(
                buffer.bootstraps[env, walk.length - 1 : walk.length], expected, rtol=1e-5, atol=1e-6
            )
            assert bool(buffer.ends[env, walk.length - 1])


def test_idle_steps_keep_the_memory_empty() -> None:
    """The policy acts on the last observation of an ended episode, but its memory forgets that too."""
    collector = collect(lambda: vector(AutoresetMode.NEXT_STEP))
    buffer, network = collector.buffer, collector.agent.network
    batch = buffer.batch(buffer.sequences(), range(4))
    with torch.no_grad():
        encoded = network.encode(buffer.observations.flatten(0, 1)[batch.cells])
        core = network.unroll(encoded.trunk, batch.stretches, batch.hidden_state)
        values = collector.agent.values_of(network.value(core, encoded), buffer.cell_tasks[batch.cells])
    torch.testing.assert_close(values, buffer.values.flatten()[batch.cells], rtol=1e-4, atol=1e-5)


# -- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AutoresetMode)
def test_evaluation_on_a_vector(mode: AutoresetMode) -> None:
    """The same episodes as in single environments, whatever their order."""
    learned = train(Walk, n_envs=4)
    expected = learned.evaluate(11, seed=5, greedy=False)
    assert learned.evaluate(11, seed=5, greedy=False, make_env=lambda: vector(mode)) == expected
    assert learned.evaluate(2, seed=5, greedy=False, make_env=lambda: vector(mode)) == expected[:2]


# -- what is refused --------------------------------------------------------------------------------------------------


class Rude(VectorEnv[Any, Any, Any]):
    """Resets in the step that ends an episode, and drops the last observation."""

    def __init__(self) -> None:
        self.num_envs, self.metadata = 2, {"autoreset_mode": AutoresetMode.SAME_STEP}
        walk = Walk()
        self.single_observation_space, self.single_action_space = walk.observation_space, walk.action_space
        self.action_space = gym.vector.utils.batch_space(walk.action_space, 2)

    def reset(self, **options: Any) -> Any:
        return np.zeros((2, 2), np.float32), {"action_mask": np.ones((2, 3), bool)}

    def step(self, actions: Any) -> Any:
        return np.zeros((2, 2)), np.ones(2), np.zeros(2, bool), np.ones(2, bool), {"action_mask": np.ones((2, 3), bool)}


def test_what_is_no_function_of_environments_is_refused() -> None:
    envs = vector(AutoresetMode.SAME_STEP)
    for wrong in (envs, Walk(), "CartPole-v1"):
        with pytest.raises(BadValueError, match=r"make_env is .*; pass a function that returns an environment"):
            train(wrong)
    with pytest.raises(BadValueError, match=r"make_env\(\) returns 3; it must return a gymnasium.Env or"):
        train(lambda: 3)
    with pytest.raises(BadValueError, match="returns a vector of 4 environments, and n_envs is 5"):
        train(lambda: vector(AutoresetMode.SAME_STEP), n_envs=5)
    with pytest.raises(BadValueError, match="returns a vector of 4 environments, and processes=True needs"):
        train(lambda: vector(AutoresetMode.SAME_STEP), processes=True)
    with pytest.raises(SpaceError, match=r"Rude resets in the step .* lack the last observation, 'final_obs'"):
        train(Rude)
    with pytest.raises(SpaceError, match="same spaces"):
        train(Walk).evaluate(1, 0, make_env=lambda: gym.make_vec("CartPole-v1", 2))


class Stuck(Walk):
    """Allows nothing at time 1."""

    def legal(self) -> Any:
        return np.full(3, self.time != 1)


@pytest.mark.parametrize(
    "make_env", [lambda: Stuck(shortest=3), lambda: SyncVectorEnv([lambda: Stuck(shortest=3)] * 2)]
)
def test_a_mask_that_allows_nothing(make_env: Any) -> None:
    """The error names head, environment, step and remedy."""
    with pytest.raises(
        EmptyMaskError, match=r"'action0' allows env 0 nothing in step 1 of its episode; allow at least"
    ):
        train(make_env)


def test_environments_are_closed_when_training_is_refused() -> None:
    closed: list[int] = []

    class Closing(Walk):
        def close(self) -> None:
            closed.append(1)

    with pytest.raises(BadValueError, match="total_steps"):
        learn(Closing, total_steps=1, n_envs=3, config=SMALL, progress=False)
    assert len(closed) == 3


def test_the_base_class_is_a_contract() -> None:
    """A batch without an implementation says so."""
    with pytest.raises(NotImplementedError):
        EnvBatch(1, open_batch(Walk, 1).codec).close()
