"""Several Gymnasium environments in lockstep, with masks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import derive_seed
from esper.leyline.numbers import require_whole
from esper.simic.agent.ppo import NotFiniteError
from esper.simic.agent.spaces import SpaceCodec, SpaceError, mask_of, read_spaces

if TYPE_CHECKING:
    import gymnasium

MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]
RESET_SEEDS = 2**31
"""Environments take seeds below this."""


class Outcome(NamedTuple):
    """What a step of all environments led to; those that ended have begun anew."""

    rewards: Tensor
    """(n,)"""
    terminated: Tensor
    """(n,) bool"""
    truncated: Tensor
    """(n,) bool: cut off, not terminated"""
    last: Tensor | None
    """(n, size): the observation that a truncated episode ended with, in its row; None where none was truncated"""


class EnvBatch:
    """n environments from one factory. `observations` (n, size) and `masks` are those of the next action."""

    def __init__(self, make_env: MakeEnv, n: int, codec: SpaceCodec | None = None) -> None:
        require_whole("n_envs", n, 1)
        self.envs = [make_env() for _ in range(n)]
        codecs = [read_spaces(env) for env in self.envs]
        self.codec = codec if codec is not None else codecs[0]
        for found in codecs:
            if found != self.codec:
                raise SpaceError(f"an environment with {found} beside {self.codec}: all must have the same spaces")
        self._observations = np.zeros((n, self.codec.observation_size), dtype=np.float32)
        self._masks = [np.ones((n, size), dtype=np.bool_) for size in self.codec.action_sizes]
        self.observations = torch.from_numpy(self._observations)
        names = self.codec.table.names
        self.masks = {name: torch.from_numpy(mask) for name, mask in zip(names, self._masks, strict=True)}
        self.returns = np.zeros(n)
        """Reward so far in each running episode."""

    def reset(self, seed: int) -> None:
        """Begin an episode everywhere; each environment's own stream of episodes follows from the seed."""
        for place in range(len(self.envs)):
            self.reset_one(place, derive_seed(seed, "env", place) % RESET_SEEDS)

    def reset_one(self, place: int, seed: int | None = None) -> None:
        """Begin an episode in one environment."""
        observation, info = self.envs[place].reset(seed=seed)
        self.returns[place] = 0.0
        self._take(place, observation, info)

    def _take(self, place: int, observation: Any, info: dict[str, Any]) -> None:  # Any: as the environment gives it
        self.codec.write_observation(observation, self._observations[place])
        self.codec.write_mask(mask_of(self.envs[place], info), [mask[place] for mask in self._masks])

    def step(self, actions: Tensor, finished: Callable[[int, float], bool] | None = None) -> Outcome:
        """Act (n, heads) everywhere. `finished(place, return)` is told of ended episodes; if it returns False no new
        one is begun there, and its observation stays."""
        n = len(self.envs)
        rewards, terminated, truncated = np.zeros(n, np.float32), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        last: np.ndarray[Any, np.dtype[np.float32]] | None = None
        for place, (env, choices) in enumerate(zip(self.envs, actions.numpy(), strict=True)):
            observation, reward, ended, cut, info = env.step(self.codec.read_action(choices))
            if not np.isfinite(float(reward)):
                raise NotFiniteError(f"environment {place} gave the reward {reward}; rewards must be finite")
            rewards[place], terminated[place], truncated[place] = reward, ended, cut and not ended
            self.returns[place] += float(reward)
            if not (ended or cut):
                self._take(place, observation, info)
                continue
            if truncated[place]:
                last = np.zeros_like(self._observations) if last is None else last
                self.codec.write_observation(observation, last[place])
            if finished is None or finished(place, float(self.returns[place])):
                self.reset_one(place)
        found, ended_at, cut_at = (torch.from_numpy(values) for values in (rewards, terminated, truncated))
        return Outcome(found, ended_at, cut_at, None if last is None else torch.from_numpy(last))

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()
