"""An environment for processes of their own, in a module that loads no torch."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Result = tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]  # Any: Gymnasium's info


class Walk(gym.Env[NDArray[np.float32], np.int64]):
    """Shows the time and noise. Episodes last `shortest` to `shortest` + 4 steps; every second one is truncated.

    Action 0 is illegal at odd times. Masks come from infos, from a method, or not at all.
    """

    def __init__(self, masks: str = "info", shortest: int = 2) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.masks, self.shortest, self.episode = masks, shortest, 0
        if masks == "method":
            self.action_masks = self.legal

    def legal(self) -> NDArray[np.bool_]:
        """The mask of the next action."""
        if self.time >= self.length:
            raise RuntimeError("the episode has ended: nothing is legal")
        return np.array([self.time % 2 == 0, True, True])

    def _see(self) -> tuple[NDArray[np.float32], dict[str, Any]]:
        seen = np.array([self.time, self.np_random.standard_normal()], np.float32)
        return seen, {"action_mask": self.legal()} if self.masks == "info" and self.time < self.length else {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.episode = 0, self.episode + 1
        self.length = int(self.np_random.integers(self.shortest, self.shortest + 5))
        return self._see()

    def step(self, action: np.int64) -> Result:
        if self.masks != "none" and not self.legal()[action]:
            raise ValueError(f"action {action} is illegal at time {self.time}")
        self.time += 1
        ended = self.time == self.length
        seen, info = self._see()
        return seen, float(action) + seen[1], ended and self.episode % 2 == 0, ended and self.episode % 2 == 1, info
