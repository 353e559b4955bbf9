"""Small environments with a known best return, each of which needs one thing: memory, patience, masks."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Observation = NDArray[np.float32]
Result = tuple[Observation, float, bool, bool, dict[str, Any]]  # Any: Gymnasium's info


class HiddenVelocityCartPole(gym.ObservationWrapper[Observation, int, Observation]):
    """CartPole-v1 that shows positions only: velocities have to be remembered."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Observation) -> Observation:
        return observation[[0, 2]]


class Recall(gym.Env[Observation, np.int64]):
    """A cue, 20 distracting steps, a question: which cue was it? 1 for the right answer."""

    CUES = 4
    DISTRACTIONS = 20

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.CUES + 3,), np.float32)
        self.action_space = spaces.Discrete(self.CUES)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(self.CUES)), 0
        return self._see(), {}

    def _see(self) -> Observation:
        seen = np.zeros(self.CUES + 3, np.float32)
        if self.time == 0:
            seen[self.cue] = 1.0
        elif self.time <= self.DISTRACTIONS:
            seen[self.CUES : self.CUES + 2] = self.np_random.standard_normal(2)
        else:
            seen[-1] = 1.0
        return seen

    def step(self, action: np.int64) -> Result:
        asked = self.time > self.DISTRACTIONS
        reward = float(asked and action == self.cue)
        self.time += 1
        return self._see(), reward, asked, False, {}


class DelayedPay(gym.Env[Observation, np.int64]):
    """The action at step 2 must fit what is seen there; it pays at step 25, behind 20 forced steps."""

    KINDS = 4
    CHOICE, PAY = 2, 25
    FORCED = range(4, 24)

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (self.KINDS + 1,), np.float32)
        self.action_space = spaces.Discrete(self.KINDS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.kind, self.time, self.right = int(self.np_random.integers(self.KINDS)), 0, False
        return self._see(), {"action_mask": self._mask()}

    def _see(self) -> Observation:
        seen = np.zeros(self.KINDS + 1, np.float32)
        if self.time == self.CHOICE:
            seen[self.kind] = 1.0
        seen[-1] = self.time / self.PAY
        return seen

    def _mask(self) -> NDArray[np.bool_]:
        mask = np.ones(self.KINDS, np.bool_)
        if self.time in self.FORCED:
            mask[1:] = False
        return mask

    def step(self, action: np.int64) -> Result:
        if not self._mask()[action]:
            raise ValueError(f"action {action} is masked at step {self.time}")
        if self.time == self.CHOICE:
            self.right = action == self.kind
        paid = self.time == self.PAY
        reward = float(paid and self.right)
        self.time += 1
        return self._see(), reward, paid, False, {"action_mask": self._mask()}


class FactoredChoice(gym.Env[np.int64, NDArray[np.int64]]):
    """Three choices at once, best and legal ones different in each of eight contexts. 1 if all three are the best.

    With `masked` the two or three legal choices of each component are told; without it an illegal one just fails.
    """

    CONTEXTS, SIZES = 8, (4, 5, 6)

    def __init__(self, masked: bool = True) -> None:
        self.masked = masked
        self.observation_space = spaces.Discrete(self.CONTEXTS)
        self.action_space = spaces.MultiDiscrete(np.array(self.SIZES))
        rules = np.random.default_rng(0)
        self.legal = [
            [np.isin(np.arange(size), rules.permutation(size)[: int(rules.integers(2, 4))]) for size in self.SIZES]
            for _ in range(self.CONTEXTS)
        ]
        self.best = [[int(rules.choice(np.flatnonzero(part))) for part in parts] for parts in self.legal]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        super().reset(seed=seed)
        self.context = self.np_random.integers(self.CONTEXTS)
        return self.context, self._info()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.legal[self.context]} if self.masked else {}

    def step(self, action: NDArray[np.int64]) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        return self.context, float(list(action) == self.best[self.context]), True, False, self._info()
