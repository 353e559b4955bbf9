"""Gymnasium environments: their spaces as heads and columns, and many stepped as one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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

Info = dict[str, Any]  # Any: what an environment puts there


class SpaceError(BadValueError):
    """A space that the agent cannot use, or one that differs from what it was trained for."""


@dataclass(frozen=True)
class SpaceCodec:
    """The spaces of an environment, as plain values that a checkpoint can keep."""

    observation_size: int
    categories: int
    """Of a Discrete observation, which becomes one-hot; 0: a Box."""
    observation_start: int
    action_sizes: tuple[int, ...]
    action_starts: tuple[int, ...]
    single_action: bool
    """Discrete (an int) rather than MultiDiscrete (an array)."""

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
            place = int(observation) - self.observation_start
            if not 0 <= place < self.categories:
                last = self.observation_start + self.categories - 1
                raise SpaceError(f"an observation of {observation}; the space has {self.observation_start} … {last}")
            row[:] = 0.0
            row[place] = 1.0
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
        """Fill one row per head with a mask: one array per component, or all of them in one; None allows all."""
        if mask is None:
            for row in rows:
                row[:] = True
            return
        flat = np.concatenate([np.asarray(part).reshape(-1) for part in mask]) if _is_nested(mask) else np.asarray(mask)
        if flat.size != sum(self.action_sizes):
            raise SpaceError(f"an action mask of {flat.size} entries; the actions are {self.action_sizes}")
        for row, part in zip(rows, np.split(flat.reshape(-1), np.cumsum(self.action_sizes)[:-1]), strict=True):
            row[:] = part.astype(bool)


def _is_nested(mask: Any) -> bool:  # Any: as the environment gives it
    return isinstance(mask, list | tuple) and any(np.ndim(part) for part in mask)


def read_spaces(env: "gymnasium.Env[Any, Any]") -> SpaceCodec:
    """The codec of an environment's spaces."""
    from gymnasium import spaces

    seen, done = env.observation_space, env.action_space
    if isinstance(seen, spaces.Discrete):
        size, categories, start = int(seen.n), int(seen.n), int(seen.start)
    elif isinstance(seen, spaces.Box):
        size, categories, start = int(np.prod(seen.shape)), 0, 0
    else:
        raise SpaceError(
            f"observation space {seen}; allowed: Box, Discrete. gymnasium.wrappers.FlattenObservation helps"
        )
    if isinstance(done, spaces.Discrete):
        return SpaceCodec(size, categories, start, (int(done.n),), (int(done.start),), True)
    if isinstance(done, spaces.MultiDiscrete) and done.nvec.ndim == 1:
        starts = tuple(int(value) for value in np.broadcast_to(done.start, done.nvec.shape))
        return SpaceCodec(size, categories, start, tuple(int(n) for n in done.nvec), starts, False)
    raise SpaceError(f"action space {done}; allowed: Discrete, MultiDiscrete with one axis")


def mask_of(env: "gymnasium.Env[Any, Any]", info: Info) -> Any:  # Any: as the environment gives it
    """The mask for the next action: `info["action_mask"]`, else what the method `action_masks()` says, else None."""
    if "action_mask" in info:
        return info["action_mask"]
    return env.get_wrapper_attr("action_masks")() if env.has_wrapper_attr("action_masks") else None


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
