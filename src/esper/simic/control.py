"""Running statistics, and the normalisers of observations, rewards and returns built on them."""

from typing import Literal

import torch
from torch import Tensor

from esper.leyline import BadValueError, UnknownNameError
from esper.leyline.numbers import require_share, require_whole

StatisticsMode = Literal["running", "ema"]
VARIANCE_FLOOR = 1e-8
"""A column that never varies is divided by 1e-4 instead of 0."""


class RunningMeanStd:
    """Mean and variance of `size` columns, over everything seen or as an exponential moving average.

    With momentum m, batch mean b and batch variance w, the moving average is that of the mixture of both, total
    variance included: mean ← mean + m·(b − mean), var ← (1−m)·var + m·w + m·(1−m)·(b − mean)².
    """

    def __init__(
        self,
        size: int,
        mode: StatisticsMode = "running",
        momentum: float = 0.1,
        device: torch.device | str = "cpu",
    ) -> None:
        if mode not in ("running", "ema"):
            raise UnknownNameError("statistics mode", mode, ("running", "ema"))
        require_share("momentum", momentum)
        self.mode, self.momentum = mode, momentum
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.var = torch.ones(size, dtype=torch.float64, device=device)
        self.count = torch.zeros(size, dtype=torch.float64, device=device)

    def update(self, values: Tensor) -> None:
        """Take in a batch (n, size)."""
        if values.dim() != 2 or values.shape[1] != len(self.mean):
            raise BadValueError(f"values of shape {tuple(values.shape)}; wanted (n, {len(self.mean)})")
        self.update_by(values.flatten(), torch.arange(len(self.mean), device=values.device).repeat(len(values)))

    def update_by(self, values: Tensor, columns: Tensor, chosen: Tensor | None = None) -> None:
        """Take in values (n,), or the chosen ones (n,) bool of them, each for the column of that number (n,)."""
        values, zeros = values.double(), torch.zeros_like(self.mean)
        if len(zeros) == 1 and len(values) and chosen is None:  # one column: nothing to sort
            var, mean = torch.var_mean(values, correction=0)
            self.merge(zeros + len(values), mean[None], var[None])
            return
        weight = torch.ones_like(values) if chosen is None else chosen.double()
        values = values if chosen is None else values.where(chosen, 0.0)
        count = zeros.index_add(0, columns, weight)
        some = count.clamp(min=1)
        mean = zeros.index_add(0, columns, values) / some
        var = zeros.index_add(0, columns, weight * (values - mean[columns]).square()) / some
        self.merge(count, mean, var)

    def merge(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        """Take in batches of `count` values with these moments, one per column; a column with count 0 stays."""
        share = count / (self.count + count)
        if self.mode == "ema":
            # Nothing to average the first batch with. (`torch.where` of two numbers would be in float32.)
            share = torch.full_like(share, self.momentum).where(self.count > 0, 1.0)
        seen, gap = count > 0, mean - self.mean
        mixed = (1 - share) * self.var + share * var + share * (1 - share) * gap.square()
        self.var = mixed.where(seen, self.var)
        self.mean = (self.mean + share * gap).where(seen, self.mean)
        self.count = self.count + count

    @property
    def std(self) -> Tensor:
        """Standard deviation, never below 1e-4."""
        return self.var.clamp(min=VARIANCE_FLOOR).sqrt()

    def reset(self) -> None:
        """Forget everything."""
        self.mean, self.var, self.count = (torch.zeros_like(self.mean), torch.ones_like(self.var), self.count * 0)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"mean": self.mean.clone(), "var": self.var.clone(), "count": self.count.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint. A state of other names or sizes raises and changes nothing."""
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        if shapes != (own := {name: tuple(value.shape) for name, value in self.state_dict().items()}):
            raise BadValueError(f"statistics of shapes {own} cannot go on from {shapes}")
        self.mean, self.var, self.count = (
            state[name].to(self.mean.device, torch.float64, copy=True) for name in ("mean", "var", "count")
        )


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
