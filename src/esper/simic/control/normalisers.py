"""Observations, rewards and returns on a scale that a network can learn from.

Threads: nothing here is locked; one thread, that of the training loop, updates and reads.
"""

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_share, require_whole
from esper.simic.control.statistics import VARIANCE_FLOOR, RunningMeanStd, StatisticsMode

CLIP = 10.0
"""Normalised observations and rewards lie within ± 10 standard deviations."""


class ObservationNormalizer:
    """Centres and scales columns that may share statistics: the same column of all slots is one statistic."""

    def __init__(self, columns: Tensor, mode: StatisticsMode = "running", device: torch.device | str = "cpu") -> None:
        """`columns` (size,): which statistic each number of an observation belongs to, 0 … K−1."""
        self.columns = columns.to(device)
        count = int(columns.max()) + 1 if len(columns) else 0
        self.statistics = RunningMeanStd(count, mode, device=device)
        self.frozen = False
        self._moments: tuple[Tensor, Tensor, Tensor] | None = None

    def update(self, observations: Tensor) -> None:
        """Take in observations (n, size); after `freeze` nothing happens."""
        if observations.dim() != 2 or observations.shape[1] != len(self.columns):
            raise BadValueError(f"observations of shape {tuple(observations.shape)}; wanted (n, {len(self.columns)})")
        if self.frozen:
            return
        self.statistics.update_by(observations.flatten(), self.columns.repeat(len(observations)))

    def freeze(self) -> None:
        """Keep the statistics from now on: what a policy sees no longer shifts under it."""
        self.frozen = True

    def __call__(self, observations: Tensor) -> Tensor:
        """(…, size) → the same, centred, scaled and clipped, in float32."""
        if self._moments is None or self._moments[0] is not self.statistics.mean:
            # Statistics replace their tensors when they change, so the same object means the same numbers.
            mean, std = (value.float()[self.columns] for value in (self.statistics.mean, self.statistics.std))
            self._moments = self.statistics.mean, mean, std
        _, mean, std = self._moments
        return ((observations - mean) / std).clamp(-CLIP, CLIP).float()


class RewardNormalizer:
    """Divides rewards by the standard deviation of the discounted return, so far, of their task. Signs are kept.

    Until the returns of a task have differed there is no scale, and its rewards stay as they are.
    """

    def __init__(
        self, n_envs: int, gamma: float, tasks: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """`tasks` (n_envs,): the task of each env, 0 … K−1; None: one task."""
        require_whole("n_envs", n_envs, 1)
        require_share("gamma", gamma)
        self.gamma = gamma
        self.tasks = torch.zeros(n_envs, dtype=torch.long) if tasks is None else tasks
        self.tasks = self.tasks.to(device)
        if self.tasks.shape != (n_envs,):
            raise BadValueError(f"tasks of shape {tuple(self.tasks.shape)} for {n_envs} envs; each needs one")
        self.statistics = RunningMeanStd(int(self.tasks.max()) + 1, device=device)
        self.returns = torch.zeros(n_envs, dtype=torch.float64, device=device)

    def __call__(self, rewards: Tensor, done: Tensor) -> Tensor:
        """One step's rewards (n_envs,) and whether the episode ended with it; updates, then scales."""
        if rewards.shape != self.returns.shape or done.shape != self.returns.shape:
            shapes = tuple(rewards.shape), tuple(done.shape)
            raise BadValueError(f"rewards and done of shapes {shapes}; wanted {tuple(self.returns.shape)} for both")
        self.returns = self.returns * self.gamma + rewards.double()
        self.statistics.update_by(self.returns, self.tasks)
        self.returns = self.returns.where(~done, 0.0)
        mean, var = self.statistics.mean, self.statistics.var
        differed = var > VARIANCE_FLOOR * mean.square()  # relative: tiny rewards are scaled like others
        scale = var.sqrt().where(differed, 1.0)[self.tasks]
        return (rewards.double() / scale).clamp(-CLIP, CLIP).to(rewards.dtype)


class ReturnNormalizer:
    """Mean and scale of returns per task: the critic learns in these units."""

    def __init__(self, tasks: int = 1, mode: StatisticsMode = "ema", device: torch.device | str = "cpu") -> None:
        self.statistics = RunningMeanStd(tasks, mode, device=device)
        self._units: tuple[Tensor, Tensor, Tensor] | None = None

    def update(self, returns: Tensor, tasks: Tensor, chosen: Tensor | None = None) -> None:
        """Take in returns (n,) of these tasks (n,), or the chosen ones (n,) bool of them."""
        self.statistics.update_by(returns, tasks, chosen)

    def normalise(self, returns: Tensor, tasks: Tensor) -> Tensor:
        """Returns (n,) in the critic's units."""
        mean, std = self._moments(tasks)
        return (returns - mean) / std

    def restore(self, values: Tensor, tasks: Tensor) -> Tensor:
        """The critic's output (n,) as a return."""
        mean, std = self._moments(tasks)
        return values * std + mean

    def _moments(self, tasks: Tensor) -> tuple[Tensor, Tensor]:
        if self._units is None or self._units[0] is not self.statistics.mean:  # as above
            self._units = self.statistics.mean, self.statistics.mean.float(), self.statistics.std.float()
        _, mean, std = self._units
        return mean[tasks], std[tasks]
