"""Batches of Gymnasium environments: several in this process, or a vector."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.simic.agent.ppo import NotFiniteError
from esper.simic.agent.spaces import SpaceCodec, SpaceError, read_spaces
from esper.tamiyo.heads import EmptyMaskError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

MakeEnv = Callable[[], Union["gymnasium.Env[Any, Any]", "VectorEnv[Any, Any, Any]"]]
RESET_SEEDS = 2**31  # environments take seeds below this


class Outcome(NamedTuple):
    """One step of n environments."""

    rewards: Tensor  # (n,)
    terminated: Tensor  # (n,) bool
    truncated: Tensor  # (n,) bool: and not terminated

    @property
    def ends(self) -> Tensor:
        """(n,) bool: episodes that ended with this step."""
        return self.terminated | self.truncated


class EnvBatch:
    """n environments. `observations` (n, size) and `masks` are those of the next action.

    One step is `step`, then `restart` where an episode has ended. Between the two, `observations` holds the last one of
    episodes that were truncated.
    """

    def __init__(self, n: int, codec: SpaceCodec) -> None:
        self.n, self.codec = n, codec
        self._observations = np.zeros((n, codec.observation_size), dtype=np.float32)
        self._masks = [np.ones((n, size), dtype=np.bool_) for size in codec.action_sizes]
        self.observations = torch.from_numpy(self._observations)
        pairs = zip(codec.table.names, self._masks, strict=True)
        self.masks = {name: torch.from_numpy(mask) for name, mask in pairs}
        self.returns = np.zeros(n)  # sum of rewards of each running episode
        self.times = np.zeros(n, np.int64)  # steps of each running episode
        self.idle = torch.zeros(n, dtype=torch.bool)  # the next step takes no action of these, but only resets them

    one_by_one: ClassVar[bool]  # whether `begin` can start single environments

    def begin(self, indices: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Start episodes in these environments. A seed determines all later episodes too; without one they continue."""
        raise NotImplementedError

    def step(self, actions: Tensor) -> Outcome:
        """Act (n, heads) in all environments that are not idle."""
        raise NotImplementedError

    def restart(self, ended: Tensor) -> None:
        """Start new episodes where `ended` (n,) bool."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all environments."""
        raise NotImplementedError

    def _start(self, index: int, observation: Any, mask: Any) -> None:  # Any: as the environment gives them
        """Note the start of an episode."""
        self.returns[index], self.times[index] = 0.0, 0
        self._show(index, observation, mask)

    def _show(self, index: int, observation: Any, mask: Any) -> None:
        """Write what the next action of an environment depends on."""
        rows = [mask[index] for mask in self._masks]
        self.codec.write_observation(observation, self._observations[index])
        self.codec.write_mask(mask, rows)
        for name, row in zip(self.masks, rows, strict=True):
            if not row.any():
                raise EmptyMaskError(
                    f"the mask of head {name!r} allows env {index} nothing in step {self.times[index]} of its episode; "
                    "allow at least one action, or end the episode one step earlier"
                )

    def _record(self, index: int, reward: Any, total: NDArray[np.float32]) -> None:
        """Note the reward of an action."""
        if not np.isfinite(float(reward)):
            raise NotFiniteError(
                f"env {index} gave the reward {reward} in step {self.times[index]} of its episode; it must be finite"
            )
        total[index] = reward
        self.returns[index] += float(reward)
        self.times[index] += 1


class LocalBatch(EnvBatch):
    """Environments in this process, one after the other."""

    one_by_one = True

    def __init__(self, envs: "Sequence[gymnasium.Env[Any, Any]]", codec: SpaceCodec | None = None) -> None:
        self.envs = envs
        codecs = [read_spaces(env.observation_space, env.action_space) for env in envs]
        for other in codecs:
            check_spaces(other, codec or codecs[0])
        super().__init__(len(envs), codec or codecs[0])

    def begin(self, indices: Sequence[int], seeds: Sequence[int | None]) -> None:
        for index, seed in zip(indices, seeds, strict=True):
            observation, info = self.envs[index].reset(seed=seed)
            self._start(index, observation, self._mask(index, info))

    def _mask(self, index: int, info: dict[str, Any]) -> Any:  # Any: as the environment gives it
        env = self.envs[index]
        if "action_mask" not in info and env.has_wrapper_attr("action_masks"):
            return env.get_wrapper_attr("action_masks")()
        return info.get("action_mask")

    def step(self, actions: Tensor) -> Outcome:
        rewards = np.zeros(self.n, np.float32)
        terminated, truncated = np.zeros(self.n, np.bool_), np.zeros(self.n, np.bool_)
        for index, (env, choices) in enumerate(zip(self.envs, actions.numpy(), strict=True)):
            observation, reward, ended, cut, info = env.step(self.codec.read_action(choices))
            self._record(index, reward, rewards)
            terminated[index], truncated[index] = ended, cut and not ended
            if truncated[index]:
                self.codec.write_observation(observation, self._observations[index])
            elif not ended:
                self._show(index, observation, self._mask(index, info))
        return Outcome(*(torch.from_numpy(values) for values in (rewards, terminated, truncated)))

    def restart(self, ended: Tensor) -> None:
        indices = ended.nonzero().flatten().tolist()
        self.begin(indices, [None] * len(indices))

    def close(self) -> None:
        for env in self.envs:
            env.close()


def check_spaces(own: SpaceCodec, needed: SpaceCodec) -> None:
    """Raise if an environment has other spaces than it should."""
    if own != needed:
        raise SpaceError(f"an environment has {own}, another {needed}; all must have the same spaces")
