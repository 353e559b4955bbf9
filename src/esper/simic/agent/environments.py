"""Gymnasium environments: their spaces as heads and columns, and batches of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import require_whole
from esper.simic.agent.ppo import NotFiniteError
from esper.tamiyo import ActionTable, ObservationLayout, discrete_table, vector_layout

if TYPE_CHECKING:
    import gymnasium

MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]
RESET_SEEDS = 2**31  # environments take seeds below this


class SpaceError(BadValueError):
    """A space that the agent cannot use, or for which it was not trained."""


@dataclass(frozen=True)
class SpaceCodec:
    """The spaces of an environment as plain values, which a checkpoint can store."""

    observation_size: int
    categories: int  # number of values of a Discrete observation, which becomes one-hot; 0: a Box
    observation_start: int
    action_sizes: tuple[int, ...]
    action_starts: tuple[int, ...]
    single_action: bool  # Discrete (an int) rather than MultiDiscrete (an array)

    @property
    def table(self) -> ActionTable:
        """One head per component."""
        return discrete_table(self.action_sizes)

    @property
    def layout(self) -> ObservationLayout:
        """One column per number."""
        return vector_layout(self.observation_size)

    def write_observation(self, observation: Any, row: NDArray[np.float32]) -> None:  # Any: as the environment gives it
        """Fill one row with an observation."""
        if self.categories:
            category = int(observation) - self.observation_start
            if not 0 <= category < self.categories:
                last = self.observation_start + self.categories - 1
                raise SpaceError(f"an observation of {observation}; the space has {self.observation_start} … {last}")
            row[:] = np.arange(self.categories) == category
            return
        values = np.asarray(observation, dtype=np.float32)
        if values.size != self.observation_size:
            raise SpaceError(f"an observation of {values.size} numbers; the space has {self.observation_size}")
        row[:] = values.reshape(-1)

    def read_action(self, choices: NDArray[np.int64]) -> int | NDArray[np.int64]:
        """The environment's action for one choice per head."""
        action: NDArray[np.int64] = choices + np.asarray(self.action_starts)
        return int(action[0]) if self.single_action else action

    def write_mask(self, mask: Any, rows: Sequence[NDArray[np.bool_]]) -> None:  # Any: as the environment gives it
        """Fill one row per head with a mask: one array per component, or one for all; None allows everything."""
        mask = np.ones(sum(self.action_sizes)) if mask is None else mask
        nested = isinstance(mask, list | tuple) and any(np.ndim(part) for part in mask)
        flat = np.concatenate([np.asarray(part).reshape(-1) for part in mask]) if nested else np.asarray(mask)
        if flat.size != sum(self.action_sizes):
            raise SpaceError(f"an action mask of {flat.size} entries; the actions are {self.action_sizes}")
        for row, part in zip(rows, np.split(flat.reshape(-1), np.cumsum(self.action_sizes)[:-1]), strict=True):
            row[:] = part.astype(bool)


def read_spaces(env: "gymnasium.Env[Any, Any]") -> SpaceCodec:
    """The codec of an environment's spaces."""
    from gymnasium import spaces

    observed, acted = env.observation_space, env.action_space
    if isinstance(observed, spaces.Discrete):
        size, categories, start = int(observed.n), int(observed.n), int(observed.start)
    elif isinstance(observed, spaces.Box):
        if len(observed.shape) > 2 or (len(observed.shape) == 2 and observed.dtype == np.uint8):
            raise SpaceError(
                f"observations of shape {observed.shape}, {observed.dtype}, are images, and this network has no "
                "convolutions; compute features in a wrapper, or use gymnasium.wrappers.FlattenObservation"
            )
        size, categories, start = int(np.prod(observed.shape)), 0, 0
    else:
        raise SpaceError(
            f"observation space {observed}; allowed: Box, Discrete; try gymnasium.wrappers.FlattenObservation"
        )
    if isinstance(acted, spaces.Discrete):
        return SpaceCodec(size, categories, start, (int(acted.n),), (int(acted.start),), True)
    if isinstance(acted, spaces.MultiDiscrete) and acted.nvec.ndim == 1:
        starts = np.broadcast_to(acted.start, acted.nvec.shape).tolist()
        return SpaceCodec(size, categories, start, tuple(acted.nvec.tolist()), tuple(starts), False)
    raise SpaceError(f"action space {acted}; allowed: Discrete, MultiDiscrete with one axis")


class EnvBatch:
    """n environments from one factory. `observations` (n, size) and `masks` are those of the next action."""

    def __init__(self, make_env: MakeEnv, n: int, codec: SpaceCodec | None = None) -> None:
        require_whole("n_envs", n, 1)
        self.envs = [make_env() for _ in range(n)]
        codecs = [read_spaces(env) for env in self.envs]
        self.codec = codec if codec is not None else codecs[0]
        for other in codecs:
            if other != self.codec:
                raise SpaceError(f"an environment has {other}, another {self.codec}; all must have the same spaces")
        self._observations = np.zeros((n, self.codec.observation_size), dtype=np.float32)
        self._masks = [np.ones((n, size), dtype=np.bool_) for size in self.codec.action_sizes]
        self.observations = torch.from_numpy(self._observations)
        names = self.codec.table.names
        self.masks = {name: torch.from_numpy(mask) for name, mask in zip(names, self._masks, strict=True)}
        self.returns = np.zeros(n)  # sum of rewards of each running episode

    def reset(self, seed: int) -> None:
        """Start an episode in all environments. The seed determines all of their later episodes too."""
        for index in range(len(self.envs)):
            self.reset_one(index, derive_seed(seed, "env", index) % RESET_SEEDS)

    def reset_one(self, index: int, seed: int | None = None) -> None:
        """Start an episode in one environment."""
        observation, info = self.envs[index].reset(seed=seed)
        self.returns[index] = 0.0
        self._write(index, observation, info)

    def _write(self, index: int, observation: Any, info: dict[str, Any]) -> None:  # Any: as the environment gives it
        env, mask = self.envs[index], info.get("action_mask")
        if "action_mask" not in info and env.has_wrapper_attr("action_masks"):
            mask = env.get_wrapper_attr("action_masks")()
        self.codec.write_observation(observation, self._observations[index])
        self.codec.write_mask(mask, [rows[index] for rows in self._masks])

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Act (n, heads) in all environments: rewards, and whether an episode terminated or else was truncated, (n,)
        each. Where one ended, the caller resets; where it was truncated, `observations` holds its last one."""
        n = len(self.envs)
        rewards, terminated, truncated = np.zeros(n, np.float32), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        for index, (env, choices) in enumerate(zip(self.envs, actions.numpy(), strict=True)):
            observation, reward, ended, cut, info = env.step(self.codec.read_action(choices))
            if not np.isfinite(float(reward)):
                raise NotFiniteError(f"environment {index} gave the reward {reward}; rewards must be finite")
            rewards[index], terminated[index], truncated[index] = reward, ended, cut and not ended
            self.returns[index] += float(reward)
            if truncated[index]:
                self.codec.write_observation(observation, self._observations[index])
            elif not ended:
                self._write(index, observation, info)
        return torch.from_numpy(rewards), torch.from_numpy(terminated), torch.from_numpy(truncated)

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()
