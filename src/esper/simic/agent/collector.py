"""Collecting experience from a batch of environments, and playing whole episodes in one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline import derive_seed
from esper.simic.agent.environments import RESET_SEEDS, EnvBatch
from esper.simic.agent.policy import forget
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import Step, TamiyoRolloutBuffer
from esper.simic.control import RewardNormalizer
from esper.tamiyo.memory import HiddenState


class RolloutCollector:
    """Fills one buffer, round after round, from a batch of environments."""

    def __init__(self, envs: EnvBatch, agent: PPOAgent, returns: list[tuple[int, float]]) -> None:
        self.envs, self.agent, self.returns = envs, agent, returns
        config, n = agent.config, envs.n
        size, hidden = envs.codec.observation_size, config.network.state_size
        self.buffer = TamiyoRolloutBuffer(n, config.steps, size, agent.table, hidden, device=agent.device)
        self.rewards = RewardNormalizer(n, config.gamma)
        self.hidden_state = agent.network.initial_state(n)
        self.raw = torch.zeros((config.steps, n, size))
        self.acted = torch.ones((config.steps, n), dtype=torch.bool)  # not the steps that only reset
        self.steps = 0

    def collect(self) -> TamiyoRolloutBuffer:
        """Collect one round, then update the statistics of observations, unless they are frozen."""
        agent, config = self.agent, self.agent.config
        self.buffer.begin(self.hidden_state, agent.epsilon)
        for step in range(config.steps):
            self.raw[step], self.acted[step] = self.envs.observations, ~self.envs.idle
            self._step(self.acted[step])
        self.buffer.cut(self._next_values(self.hidden_state))
        if agent.progress >= config.freeze_after:
            agent.observations.freeze()
        seen = self.raw.flatten(0, 1) if bool(self.acted.all()) else self.raw[self.acted]
        agent.observations.update(seen.to(agent.device))
        return self.buffer

    def _step(self, acted: Tensor) -> None:
        agent, envs = self.agent, self.envs
        observations = normalise(agent, envs.observations)
        # A copy: the environments write the next masks into the same tensors.
        masks = {name: mask.to(agent.device, copy=True) for name, mask in envs.masks.items()}
        decision, values, after = agent.act(observations, masks, self.hidden_state, epsilon=self.buffer.epsilon)
        self.steps += envs.n
        outcome = envs.step(decision.actions.cpu())
        rewards, ends = outcome.rewards, outcome.ends
        rewards = self.rewards(rewards, ends, acted) if agent.config.normalise_rewards else rewards
        bootstraps = torch.zeros_like(values)
        if bool(outcome.truncated.any()):
            bootstraps = self._next_values(after).where(outcome.truncated.to(agent.device), 0.0)
        self.returns.extend((self.steps, total) for total in envs.returns[ends.numpy()].tolist())
        envs.restart(ends)
        values = agent.values_of(values, self.buffer.tasks)
        sent = rewards.to(agent.device), ends.to(agent.device), bootstraps
        step = Step(observations, masks, decision.actions, decision.log_probs, values, *sent)
        if bool(acted.all()):
            self.buffer.add(step)
        elif bool(acted.any()):
            self.buffer.add(rows_of(step, acted.to(agent.device)), acted.nonzero().flatten().tolist())
        self.hidden_state = forget(after, (ends | ~acted).to(agent.device))

    @torch.no_grad()
    def _next_values(self, hidden_state: HiddenState) -> Tensor:
        """(n,): values of the environments' current observations."""
        network = self.agent.network
        encoded = network.encode(normalise(self.agent, self.envs.observations))
        core, _ = network.step(encoded.trunk, hidden_state)
        return self.agent.values_of(network.value(core, encoded), self.buffer.tasks)


def rows_of(step: Step, chosen: Tensor) -> Step:
    """The chosen (n,) bool envs of a step."""
    masks = {name: mask[chosen] for name, mask in step.masks.items()}
    others = {name: part[chosen] for name, part in step._asdict().items() if name != "masks"}
    return Step(masks=masks, **others)


def normalise(agent: PPOAgent, observations: Tensor) -> Tensor:
    """Normalise a copy of raw observations (n, size) on the agent's device."""
    return agent.normalise(observations.to(agent.device, copy=True))


def play(agent: PPOAgent, envs: EnvBatch, episodes: int, seed: int, *, greedy: bool) -> list[float]:
    """Undiscounted returns of new episodes, in order. Each depends only on the seed and its number.

    Where single environments can be reset, the next episode begins when one ends; else when all have ended.
    """
    results: dict[int, float] = {}
    waiting = iter(range(episodes))
    running: list[int | None] = [None] * envs.n
    generators = [torch.Generator() for _ in running]

    def begin(chosen: Sequence[int]) -> None:
        seeds: list[int | None] = []
        for env in chosen:
            episode = running[env] = next(waiting, None)
            if episode is None:  # it continues until the others end; its returns do not count
                seeds.append(None)
                continue
            generators[env].manual_seed(derive_seed(seed, "draws", episode))
            seeds.append(derive_seed(seed, "evaluation", episode) % RESET_SEEDS)
        envs.begin(chosen, seeds)

    begin(range(envs.n))
    hidden_state = agent.network.initial_state(envs.n)
    while len(results) < episodes:
        masks = {name: mask.to(agent.device) for name, mask in envs.masks.items()}
        draws = torch.stack([torch.rand(len(agent.table), generator=generator) for generator in generators])
        observations = normalise(agent, envs.observations)
        decision, _, hidden_state = agent.act(observations, masks, hidden_state, greedy=greedy, uniform=draws)
        idle = envs.idle.clone()
        ends = envs.step(decision.actions.cpu()).ends
        ended = ends.nonzero().flatten().tolist()
        for env in ended:
            if (episode := running[env]) is not None:
                results[episode], running[env] = float(envs.returns[env]), None
        hidden_state = forget(hidden_state, (ends | idle).to(agent.device))
        if envs.one_by_one:
            begin(ended)
        elif all(episode is None for episode in running):
            begin(range(envs.n))
            hidden_state = agent.network.initial_state(envs.n)
        else:
            envs.restart(ends)
    return [results[episode] for episode in range(episodes)]
