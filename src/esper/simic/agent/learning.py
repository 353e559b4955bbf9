"""Training on Gymnasium environments with discrete actions."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import require_whole
from esper.leyline.progress import progress_bar
from esper.simic.agent.checkpoint import load_agent, save_agent
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.environments import RESET_SEEDS, EnvBatch, MakeEnv, SpaceCodec
from esper.simic.agent.metrics import PPOUpdateMetrics
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import Step, TamiyoRolloutBuffer
from esper.simic.control import RewardNormalizer, RunningMeanStd
from esper.tamiyo.memory import HiddenState

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECENT = 100  # episodes in the mean return of a `LearnProgress`
EVALUATED_AT_ONCE = 16


@dataclass(frozen=True)
class RewardScale:
    """Statistics of the discounted returns whose deviation divides rewards."""

    mean: float
    var: float
    count: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 <= self.var < math.inf and 0 <= self.count < math.inf):
            raise BadValueError(f"{self}: these are not finite, or below 0")


class Learned:
    """A trained policy, ready to act, evaluate, save and train further."""

    def __init__(self, agent: PPOAgent, codec: SpaceCodec, make_env: MakeEnv | None = None) -> None:
        self.agent, self.codec, self.make_env = agent, codec, make_env
        self.reward_statistics = RunningMeanStd(1)
        self.history: list[PPOUpdateMetrics] = []  # one entry per update; not saved, as `returns`
        self.returns: list[tuple[int, float]] = []  # (environment steps so far, return) of every training episode

    def act(
        self, observation: Any, hidden_state: HiddenState | None = None, mask: Any = None, *, greedy: bool = True
    ) -> tuple["int | NDArray[np.int64]", HiddenState]:  # Any: as the environment gives them
        """The action for one observation, and the hidden state for the next; pass None at the start of an episode."""
        agent = self.agent
        row = np.zeros(self.codec.observation_size, np.float32)
        self.codec.write_observation(observation, row)
        masks = agent.table.open_masks(1)
        self.codec.write_mask(mask, [part[0].numpy() for part in masks.values()])
        masks = {name: part.to(agent.device) for name, part in masks.items()}
        hidden_state = agent.network.initial_state(1) if hidden_state is None else hidden_state
        normalised = normalise(agent, torch.from_numpy(row)[None])
        decision, _, hidden_state = agent.act(normalised, masks, hidden_state, greedy=greedy)
        return self.codec.read_action(decision.actions[0].cpu().numpy()), hidden_state

    def evaluate(self, episodes: int, seed: int, *, greedy: bool = True) -> list[float]:
        """Undiscounted returns of new episodes, in order. Each depends only on the seed and its number."""
        require_whole("episodes", episodes, 1)
        if self.make_env is None:
            raise BadValueError("no environment to evaluate in; pass one: Learned.load(folder, make_env)")
        agent, n = self.agent, min(episodes, EVALUATED_AT_ONCE)
        envs = EnvBatch(self.make_env, n, self.codec)
        results: dict[int, float] = {}
        waiting = iter(range(episodes))
        running: list[int | None] = [None] * n
        generators = [torch.Generator() for _ in range(n)]

        def begin(env: int) -> None:
            episode = running[env] = next(waiting, None)
            if episode is None:  # continues until the others end; its returns do not count
                envs.reset_one(env)
                return
            generators[env].manual_seed(derive_seed(seed, "draws", episode))
            envs.reset_one(env, derive_seed(seed, "evaluation", episode) % RESET_SEEDS)

        with closing(envs):
            for env in range(n):
                begin(env)
            hidden_state = agent.network.initial_state(n)
            while len(results) < episodes:
                masks = {name: mask.to(agent.device) for name, mask in envs.masks.items()}
                draws = torch.stack([torch.rand(len(agent.table), generator=generator) for generator in generators])
                decision, _, hidden_state = agent.act(
                    normalise(agent, envs.observations), masks, hidden_state, greedy=greedy, uniform=draws
                )
                _, terminated, truncated = envs.step(decision.actions.cpu())
                for env in (terminated | truncated).nonzero().flatten().tolist():
                    if (episode := running[env]) is not None:
                        results[episode] = float(envs.returns[env])
                    for part in hidden_state:
                        part[env] = 0.0
                    begin(env)
        return [results[episode] for episode in range(episodes)]

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint: safetensors and JSON, nothing pickled."""
        scale = RewardScale(**{name: float(value) for name, value in self.reward_statistics.state_dict().items()})
        save_agent(self.agent, Path(folder), {"codec": self.codec, "rewards": scale})

    @classmethod
    def load(cls, folder: Path | str, make_env: MakeEnv | None = None, *, device: str = "cpu") -> "Learned":
        """Read a checkpoint. `make_env`, for evaluation, must have the spaces of training."""
        agent, extras = load_agent(Path(folder), {"codec": SpaceCodec, "rewards": RewardScale}, device=device)
        if make_env is not None:
            EnvBatch(make_env, 1, extras["codec"]).close()
        learned = cls(agent, extras["codec"], make_env)
        scale = {name: torch.tensor([value], dtype=torch.float64) for name, value in vars(extras["rewards"]).items()}
        learned.reward_statistics.load_state_dict(scale)
        return learned


class LearnProgress(NamedTuple):
    """The state of a training after an update, for callbacks."""

    learned: Learned  # the policy so far, to evaluate or save
    steps: int  # environment steps so far
    mean_return: float  # of the last 100 episodes; NaN before the first has ended
    metrics: PPOUpdateMetrics


def normalise(agent: PPOAgent, observations: Tensor) -> Tensor:
    """Normalise a copy of raw observations (n, size) on the agent's device."""
    return agent.normalise(observations.to(agent.device, copy=True))


def learn(
    make_env: MakeEnv,
    *,
    total_steps: int,
    n_envs: int = 8,
    seed: int = 0,
    config: PPOConfig | None = None,
    device: str = "cpu",
    progress: bool = True,
    callback: Callable[[LearnProgress], bool | None] | None = None,
    start: Learned | None = None,
) -> Learned:
    """Train a policy with PPO on the environments that `make_env()` returns.

    Observations may be Box or Discrete, actions Discrete or MultiDiscrete. Masks come from `info["action_mask"]` or a
    method `action_masks()`; for MultiDiscrete, as one array per component or one for all. Training runs as many whole
    rounds of `n_envs × config.steps` steps as `total_steps` allows. It calls `callback` after every update, and ends
    early if that returns False. `start`, trained or loaded, is trained further on its device with its configuration;
    `total_steps` then includes the steps that it has done.
    """
    if start is not None and config not in (None, start.agent.config):
        raise BadValueError("start is trained further with its own config, and another one was given; omit config")
    config, done = (config or PPOConfig(), 0) if start is None else (start.agent.config, start.agent.updates)
    size, remark = n_envs * config.steps, f" ({done + 1} rounds of {n_envs} × {config.steps}; {done} are done)"
    require_whole("total_steps", total_steps, (done + 1) * size, remark=remark)
    envs = EnvBatch(make_env, n_envs, None if start is None else start.codec)
    table, layout, rounds = envs.codec.table, envs.codec.layout, total_steps // size
    rng_seed = derive_seed(seed, "agent") % 2**62
    learned = start or Learned(PPOAgent(table, layout, config, rng_seed=rng_seed, device=device), envs.codec)
    agent, learned.make_env = learned.agent, make_env
    agent.total_updates = rounds
    collector = RolloutCollector(envs, agent, learned.returns)
    collector.rewards.statistics, collector.steps = learned.reward_statistics, done * size
    envs.reset(derive_seed(seed, "round", done) if done else seed)  # other episodes than before
    with closing(envs), progress_bar("learning", rounds - done, shown=progress) as advance:
        for _ in range(done, rounds):
            learned.history.append(agent.update(collector.collect()))
            recent = float(np.mean([total for _, total in learned.returns[-RECENT:]] or np.nan))
            advance(1, f"return {recent:.4g}")
            state = LearnProgress(learned, collector.steps, recent, learned.history[-1])
            if callback is not None and isinstance(wanted := callback(state), bool | np.bool_) and not wanted:
                break
    return learned


class RolloutCollector:
    """Fills one buffer, round after round, from a batch of environments."""

    def __init__(self, envs: EnvBatch, agent: PPOAgent, returns: list[tuple[int, float]]) -> None:
        self.envs, self.agent, self.returns = envs, agent, returns
        config, n = agent.config, len(envs.envs)
        size, hidden = envs.codec.observation_size, config.network.state_size
        self.buffer = TamiyoRolloutBuffer(n, config.steps, size, agent.table, hidden, device=agent.device)
        self.rewards = RewardNormalizer(n, config.gamma)
        self.hidden_state = agent.network.initial_state(n)
        self.raw = torch.zeros((config.steps, n, size))
        self.steps = 0

    def collect(self) -> TamiyoRolloutBuffer:
        """Collect one round, then update the statistics of observations, unless they are frozen."""
        agent, config = self.agent, self.agent.config
        self.buffer.begin(self.hidden_state, agent.epsilon)
        for step in range(config.steps):
            self.raw[step] = self.envs.observations
            self._step()
        self.buffer.cut(self._next_values(self.hidden_state))
        if agent.progress >= config.freeze_after:
            agent.observations.freeze()
        agent.observations.update(self.raw.flatten(0, 1).to(agent.device))
        return self.buffer

    def _step(self) -> None:
        agent, envs = self.agent, self.envs
        observations = normalise(agent, envs.observations)
        # A copy: the environments write the next masks into the same tensors.
        masks = {name: mask.to(agent.device, copy=True) for name, mask in envs.masks.items()}
        decision, values, after = agent.act(observations, masks, self.hidden_state, epsilon=self.buffer.epsilon)
        self.steps += len(envs.envs)
        rewards, terminated, truncated = envs.step(decision.actions.cpu())
        ends = terminated | truncated
        rewards = self.rewards(rewards, ends) if agent.config.normalise_rewards else rewards
        bootstraps = torch.zeros_like(values)
        if bool(truncated.any()):
            bootstraps = self._next_values(after).where(truncated.to(agent.device), 0.0)
        for env in ends.nonzero().flatten().tolist():
            self.returns.append((self.steps, float(envs.returns[env])))
            envs.reset_one(env)
        rewards, ends = rewards.to(agent.device), ends.to(agent.device)
        values = agent.values_of(values, self.buffer.tasks)
        self.buffer.add(
            Step(observations, masks, decision.actions, decision.log_probs, values, rewards, ends, bootstraps)
        )
        carried = ~ends.unsqueeze(1)
        self.hidden_state = (after[0].where(carried, 0.0), after[1].where(carried, 0.0))

    @torch.no_grad()
    def _next_values(self, hidden_state: HiddenState) -> Tensor:
        """(n,): values of the environments' current observations."""
        network = self.agent.network
        encoded = network.encode(normalise(self.agent, self.envs.observations))
        core, _ = network.step(encoded.trunk, hidden_state)
        return self.agent.values_of(network.value(core, encoded), self.buffer.tasks)
