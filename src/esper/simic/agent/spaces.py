"""Gymnasium's spaces as tensors: observations as flat vectors, actions as a table of heads, masks per head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline import BadValueError
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
