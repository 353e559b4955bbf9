"""Running mean and variance.

Threads: nothing here is locked; one thread, that of the training loop, updates and reads. All arithmetic is in float64
on the device that the statistics live on, without a transfer.
"""

from typing import Literal

import torch
from torch import Tensor

from esper.leyline import BadValueError, UnknownNameError
from esper.leyline.numbers import require_share

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
