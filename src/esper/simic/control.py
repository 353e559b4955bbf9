"""Running statistics, and the normalisers of observations, rewards and returns that use them.

Threads: nothing here is locked; only the thread of the training loop may use it.
"""

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_share, require_whole

__all__ = ["ObservationNormalizer", "ReturnNormalizer", "RewardNormalizer", "RunningMeanStd"]

VARIANCE_FLOOR = 1e-8  # a constant column is divided by 1e-4 instead of 0


class RunningMeanStd:
    """Mean and variance of `size` columns: over all values, or with a momentum as an exponential moving average.

    With momentum m, batch mean b and batch variance w, the moving average is that of the mixture of both, including
    the variance between them: mean ← mean + m·(b − mean), var ← (1−m)·var + m·w + m·(1−m)·(b − mean)².
    """

    def __init__(self, size: int, momentum: float | None = None, device: torch.device | str = "cpu") -> None:
        if momentum is not None:
            require_share("momentum", momentum)
        self.momentum = momentum
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.var, self.count = torch.ones_like(self.mean), torch.zeros_like(self.mean)
        self._moments: tuple[Tensor, Tensor, Tensor] | None = None

    def update(self, values: Tensor) -> None:
        """Update with a batch (n, size)."""
        if values.dim() != 2 or values.shape[1] != len(self.mean):
            raise BadValueError(f"values of shape {tuple(values.shape)}; wanted (n, {len(self.mean)})")
        self.update_by(values.flatten(), torch.arange(len(self.mean), device=values.device).repeat(len(values)))

    def update_by(self, values: Tensor, columns: Tensor, chosen: Tensor | None = None) -> None:
        """Update the column of each value, (n,) both. `chosen` (n,) bool limits which values count."""
        values, zeros = values.double(), torch.zeros_like(self.mean)
        if len(zeros) == 1 and len(values) and chosen is None:  # one column: nothing to sort
            var, mean = torch.var_mean(values, correction=0)
            self._merge(zeros + len(values), mean[None], var[None])
            return
        weight = torch.ones_like(values) if chosen is None else chosen.double()
        values = values if chosen is None else values.where(chosen, 0.0)
        count = zeros.index_add(0, columns, weight)
        divisor = count.clamp(min=1)
        mean = zeros.index_add(0, columns, values) / divisor
        var = zeros.index_add(0, columns, weight * (values - mean[columns]).square()) / divisor
        self._merge(count, mean, var)

    def _merge(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        share = count / (self.count + count)
        if self.momentum is not None:
            # The first batch counts fully. (`torch.where` of two numbers would be in float32.)
            share = torch.full_like(share, self.momentum).where(self.count > 0, 1.0)
        filled, gap = count > 0, mean - self.mean
        mixed = (1 - share) * self.var + share * var + share * (1 - share) * gap.square()
        self.var = mixed.where(filled, self.var)
        self.mean = (self.mean + share * gap).where(filled, self.mean)
        self.count = self.count + count

    @property
    def std(self) -> Tensor:
        """Standard deviation, never below 1e-4."""
        return self.var.clamp(min=VARIANCE_FLOOR).sqrt()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation in float32, cached. Updates replace `mean`, so the same tensor is still valid."""
        if self._moments is None or self._moments[0] is not self.mean:
            self._moments = self.mean, self.mean.float(), self.std.float()
        return self._moments[1:]

    def reset(self) -> None:
        """Return to the initial state."""
        self.mean, self.var, self.count = torch.zeros_like(self.mean), torch.ones_like(self.var), self.count * 0

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a checkpoint."""
        return {"mean": self.mean.clone(), "var": self.var.clone(), "count": self.count.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore copies of the tensors of `state_dict`."""
        self.mean, self.var, self.count = (
            state[name].to(self.mean.device, torch.float64, copy=True) for name in ("mean", "var", "count")
        )


CLIP = 10.0  # normalised observations and rewards are clipped to ± 10 standard deviations


class ObservationNormalizer:
    """Centres and scales columns. Columns may share statistics, as the same column of all slots does."""

    def __init__(self, columns: Tensor, as_they_are: Tensor | None = None, device: torch.device | str = "cpu") -> None:
        """`columns` (size,): index of the statistic of each number of an observation, 0 … K−1. `as_they_are` (size,)
        bool: numbers that are not normalised."""
        self.columns = columns.to(device)
        kept = torch.zeros(len(columns), dtype=torch.bool) if as_they_are is None else as_they_are
        self.as_they_are = kept.to(device) if bool(kept.any()) else None
        self.statistics = RunningMeanStd(int(columns.max()) + 1, device=device)
        self.frozen = False

    def update(self, observations: Tensor, counted: Tensor | None = None) -> None:
        """Update the statistics with observations (n, size), unless they are frozen. `counted` (n, size) bool limits
        which numbers count."""
        if observations.dim() != 2 or observations.shape[1] != len(self.columns):
            raise BadValueError(f"observations of shape {tuple(observations.shape)}; wanted (n, {len(self.columns)})")
        if not self.frozen:
            chosen = None if counted is None else counted.flatten()
            self.statistics.update_by(observations.flatten(), self.columns.repeat(len(observations)), chosen)

    def freeze(self) -> None:
        """Freeze the statistics, so that the policy's inputs stop shifting."""
        self.frozen = True

    def __call__(self, observations: Tensor) -> Tensor:
        """Observations (…, size), centred, scaled and clipped, in float32."""
        mean, std = self.statistics.moments()
        normalised = ((observations - mean[self.columns]) / std[self.columns]).clamp(-CLIP, CLIP).float()
        return normalised if self.as_they_are is None else torch.where(self.as_they_are, observations, normalised)


class RewardNormalizer:
    """Divides rewards, uncentred, by the deviation of their discounted returns, once these have differed."""

    def __init__(self, n_envs: int, gamma: float) -> None:
        require_whole("n_envs", n_envs, 1)
        require_share("gamma", gamma)
        self.gamma, self.statistics = gamma, RunningMeanStd(1)
        self.returns = torch.zeros(n_envs, dtype=torch.float64)

    def __call__(self, rewards: Tensor, done: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Update with one step's rewards and episode ends, (n_envs,) both. Returns the scaled rewards.

        `chosen` (n_envs,) bool limits which envs count; the rewards of the others are 0.
        """
        if rewards.shape != self.returns.shape or done.shape != self.returns.shape:
            shapes = tuple(rewards.shape), tuple(done.shape)
            raise BadValueError(f"rewards and done of shapes {shapes}; wanted {tuple(self.returns.shape)} for both")
        self.returns = self.returns * self.gamma + rewards.double()
        counted = self.returns if chosen is None or bool(chosen.all()) else self.returns[chosen]
        self.statistics.update(counted.unsqueeze(1))
        self.returns = self.returns.where(~done, 0.0)
        mean, var = self.statistics.mean, self.statistics.var
        differed = var > VARIANCE_FLOOR * mean.square()  # relative, so that tiny rewards are scaled like others
        scale = var.sqrt().where(differed, 1.0)
        return (rewards.double() / scale).clamp(-CLIP, CLIP).to(rewards.dtype)


class ReturnNormalizer:
    """Mean and scale of returns per task, the units of the critic."""

    def __init__(self, tasks: int = 1, device: torch.device | str = "cpu") -> None:
        self.statistics = RunningMeanStd(tasks, momentum=0.1, device=device)

    def update(self, returns: Tensor, tasks: Tensor, chosen: Tensor | None = None) -> None:
        """Update the statistics with returns (n,) of tasks (n,). `chosen` (n,) limits which rows count."""
        self.statistics.update_by(returns, tasks, chosen)

    def normalise(self, returns: Tensor, tasks: Tensor) -> Tensor:
        """Returns (n,) in the critic's units."""
        mean, std = self.statistics.moments()
        return (returns - mean[tasks]) / std[tasks]

    def restore(self, values: Tensor, tasks: Tensor) -> Tensor:
        """The critic's outputs (n,) as returns."""
        mean, std = self.statistics.moments()
        return values * std[tasks] + mean[tasks]
