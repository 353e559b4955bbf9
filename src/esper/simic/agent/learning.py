"""The door for Gymnasium users: train on any environment with discrete actions."""

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from esper.simic.control import RewardNormalizer
from esper.tamiyo.network import HiddenState

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECENT = 100
"""Episodes in the mean return that the progress bar shows."""
EVALUATED_AT_ONCE = 16


class Learned:
    """A trained policy, with everything needed to use it and to keep it."""

    def __init__(self, agent: PPOAgent, codec: SpaceCodec, make_env: MakeEnv | None = None) -> None:
        self.agent, self.codec, self.make_env = agent, codec, make_env
        self.history: list[PPOUpdateMetrics] = []
        """One entry per update."""
        self.returns: list[tuple[int, float]] = []
        """(environment steps so far, return) of every episode that ended in training."""

    def act(
        self, observation: Any, hidden_state: HiddenState | None = None, mask: Any = None, *, greedy: bool = True
    ) -> tuple["int | NDArray[np.int64]", HiddenState]:  # Any: as the environment gives them
        """The action for one observation, and the memory to hand in with the next; None at the start of an episode."""
        agent = self.agent
        row = np.zeros(self.codec.observation_size, np.float32)
        self.codec.write_observation(observation, row)
        rows = [np.ones(size, np.bool_) for size in self.codec.action_sizes]
        self.codec.write_mask(mask, rows)
        masks = {
            name: torch.from_numpy(part)[None].to(agent.device)
            for name, part in zip(agent.table.names, rows, strict=True)
        }
        seen = normalise(agent, torch.from_numpy(row)[None])
        hidden_state = agent.network.initial_state(1) if hidden_state is None else hidden_state
        decision, _, hidden_state = agent.act(seen, masks, hidden_state, greedy=greedy)
        return self.codec.read_action(decision.actions[0].cpu().numpy()), hidden_state

    def evaluate(self, episodes: int, seed: int, *, greedy: bool = True) -> list[float]:
        """Undiscounted returns of so many fresh episodes, in order. Each follows from the seed and its number."""
        require_whole("episodes", episodes, 1)
        if self.make_env is None:
            raise BadValueError("no environment to evaluate in; hand one in: Learned.load(folder, make_env)")
        envs = EnvBatch(self.make_env, min(episodes, EVALUATED_AT_ONCE), self.codec)
        try:
            return self._play(envs, episodes, seed, greedy=greedy)
        finally:
            envs.close()

    def _play(self, envs: EnvBatch, episodes: int, seed: int, *, greedy: bool) -> list[float]:
        """Returns of the episodes; each place takes the next one when it has finished one."""
        agent, n = self.agent, len(envs.envs)
        results: dict[int, float] = {}
        running = list(range(n))
        waiting = iter(range(n, episodes))
        generators: dict[int, torch.Generator] = {}

        def begin(place: int, episode: int) -> None:
            running[place] = episode
            generators[place] = torch.Generator().manual_seed(derive_seed(seed, "draws", episode))
            envs.reset_one(place, derive_seed(seed, "evaluation", episode) % RESET_SEEDS)

        def finished(place: int, total: float) -> bool:
            if running[place] < 0:
                return True  # idles on, its returns no longer count
            results[running[place]] = total
            running[place] = -1
            fresh.append(place)
            return False

        for place in range(n):
            begin(place, place)
        hidden_state = agent.network.initial_state(n)
        while len(results) < episodes:
            fresh: list[int] = []
            masks = {name: mask.to(agent.device) for name, mask in envs.masks.items()}
            draws = [torch.rand(len(agent.table), generator=generators[place]) for place in range(n)]
            decision, _, hidden_state = agent.act(
                normalise(agent, envs.observations), masks, hidden_state, greedy=greedy, uniform=torch.stack(draws)
            )
            envs.step(decision.actions.cpu(), finished)
            for place in fresh:
                for part in hidden_state:
                    part[place] = 0.0
                if (episode := next(waiting, None)) is not None:
                    begin(place, episode)
                else:
                    envs.reset_one(place)
        return [results[episode] for episode in range(episodes)]

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint: safetensors and JSON, nothing pickled."""
        save_agent(self.agent, Path(folder), {"codec": self.codec})

    @classmethod
    def load(cls, folder: Path | str, make_env: MakeEnv | None = None, *, device: str = "cpu") -> "Learned":
        """Read a checkpoint; with `make_env` it can be evaluated. Its spaces must be those it was trained for."""
        agent, extras = load_agent(Path(folder), {"codec": SpaceCodec}, device=device)
        codec = extras["codec"]
        assert isinstance(codec, SpaceCodec)
        if make_env is not None:
            EnvBatch(make_env, 1, codec).close()
        return cls(agent, codec, make_env)


def normalise(agent: PPOAgent, observations: Tensor) -> Tensor:
    """Raw observations (n, size) as the policy sees them."""
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
) -> Learned:
    """Train a policy with PPO on the environments that `make_env()` returns.

    Observations may be Box or Discrete, actions Discrete or MultiDiscrete. Masks are taken from `info["action_mask"]`
    or a method `action_masks()`, for MultiDiscrete one array per component or all in one. Training takes as many whole
    rounds of `n_envs × config.steps` steps as fit into `total_steps`.
    """
    config = config if config is not None else PPOConfig()
    require_whole("total_steps", total_steps, n_envs * config.steps, remark=f" (a round: {n_envs} × {config.steps})")
    envs = EnvBatch(make_env, n_envs)
    rounds = total_steps // (n_envs * config.steps)
    agent = PPOAgent(
        envs.codec.table, envs.codec.layout, config, total_updates=rounds, rng_seed=derive_seed(seed, "agent") % 2**62,
        device=device,
    )  # fmt: skip
    learned = Learned(agent, envs.codec, make_env)
    collector = RolloutCollector(envs, agent, learned.returns)
    envs.reset(seed)
    try:
        with progress_bar("learning", rounds, shown=progress) as advance:
            for _ in range(rounds):
                buffer = collector.collect()
                learned.history.append(agent.update(buffer))
                advance(1, f"return {collector.recent:.4g}")
    finally:
        envs.close()
    return learned


class RolloutCollector:
    """Fills one buffer, round after round, from a batch of environments."""

    def __init__(self, envs: EnvBatch, agent: PPOAgent, returns: list[tuple[int, float]]) -> None:
        self.envs, self.agent, self.returns = envs, agent, returns
        config, n = agent.config, len(envs.envs)
        size, hidden = envs.codec.observation_size, config.network.hidden
        self.buffer = TamiyoRolloutBuffer(n, config.steps, size, agent.table, hidden, device=agent.device)
        self.rewards = RewardNormalizer(n, config.gamma)
        self.hidden_state = agent.network.initial_state(n)
        self.raw = torch.zeros((config.steps, n, size))
        self.steps = 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def recent(self) -> float:
        """Mean return of the last episodes."""
        return float(np.mean(self._recent)) if self._recent else float("nan")

    def _finished(self, place: int, total: float) -> bool:
        self._recent.append(total)
        self.returns.append((self.steps, total))
        return True

    def collect(self) -> TamiyoRolloutBuffer:
        """One round. The statistics of observations take it in when it is complete, until they freeze."""
        agent, config = self.agent, self.agent.config
        epsilon = agent.epsilon
        self.buffer.begin(self.hidden_state, epsilon)
        for step in range(config.steps):
            self.raw[step] = self.envs.observations
            self._step(epsilon)
        seen = normalise(agent, self.envs.observations)
        self.buffer.cut(self._values(seen, self.hidden_state))
        if agent.progress >= config.freeze_after:
            agent.observations.freeze()
        agent.observations.update(self.raw.flatten(0, 1).to(agent.device))
        return self.buffer

    def _step(self, epsilon: float) -> None:
        agent, envs = self.agent, self.envs
        seen = normalise(agent, envs.observations)
        # The environments write the next masks into the same memory.
        masks = {name: mask.to(agent.device, copy=True) for name, mask in envs.masks.items()}
        decision, values, after = agent.act(seen, masks, self.hidden_state, epsilon=epsilon)
        self.steps += len(envs.envs)
        outcome = envs.step(decision.actions.cpu(), self._finished)
        ends = outcome.terminated | outcome.truncated
        rewards = self.rewards(outcome.rewards, ends) if agent.config.normalise_rewards else outcome.rewards
        bootstraps = torch.zeros_like(values)
        if outcome.last is not None:
            follows = self._values(normalise(agent, outcome.last), after)
            bootstraps = follows.where(outcome.truncated.to(agent.device), 0.0)
        ends = ends.to(agent.device)
        step = Step(
            seen,
            masks,
            decision.actions,
            decision.log_probs,
            agent.values_of(values, self.buffer.tasks),
            rewards.to(agent.device),
            ends,
            bootstraps,
        )
        self.buffer.add(step)
        keep = ~ends.unsqueeze(1)
        self.hidden_state = (after[0].where(keep, 0.0), after[1].where(keep, 0.0))

    @torch.no_grad()
    def _values(self, seen: Tensor, hidden_state: HiddenState) -> Tensor:
        """Returns expected from here on (n,)."""
        network = self.agent.network
        encoded = network.encode(seen)
        core, _ = network.step(encoded.trunk, hidden_state)
        return self.agent.values_of(network.value(core, encoded), self.buffer.tasks)
