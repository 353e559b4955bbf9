"""Gymnasium's spaces as heads and columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline import BadValueError
from esper.tamiyo import ActionTable, ObservationLayout, discrete_table, vector_layout

if TYPE_CHECKING:
    from gymnasium import Space


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


def read_spaces(observed: "Space[Any]", acted: "Space[Any]") -> SpaceCodec:
    """The codec of an environment's observation and action spaces."""
    from gymnasium import spaces

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
            f"observation space {observed}; allowed: Box, Discrete; gymnasium.wrappers.FlattenObservation turns Dict, "
            "Tuple, MultiDiscrete and MultiBinary into a Box (leave images out of them)"
        )
    if isinstance(acted, spaces.Discrete):
        return SpaceCodec(size, categories, start, (int(acted.n),), (int(acted.start),), True)
    if isinstance(acted, spaces.MultiDiscrete) and acted.nvec.ndim == 1:
        starts = np.broadcast_to(acted.start, acted.nvec.shape).tolist()
        return SpaceCodec(size, categories, start, tuple(acted.nvec.tolist()), tuple(starts), False)
    raise SpaceError(f"action space {acted}; allowed: Discrete, MultiDiscrete with one axis")
