"""What the policy saw in a round, column by column."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive
from esper.simic.control import CLIP
from esper.simic.telemetry.transfer import fetch


@dataclass(frozen=True)
class ColumnStatistics:
    """One named column over a round; of its finite numbers, None where there is none."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    at_bound: float
    """Share of all numbers that lie at the bound or beyond: there the policy no longer sees differences."""
    not_finite: int
    count: int
    """All numbers"""


@torch.no_grad()
def observation_statistics(
    observations: Tensor, names: Sequence[str], columns: Tensor | None = None, *, bound: float = CLIP
) -> dict[str, ColumnStatistics]:
    """By column, of observations (…, size) as the policy sees them. `columns` (size,): the index of the name that each
    number belongs to (`ObservationLayout.columns()`); None: one each. Host sync: one."""
    size = observations.shape[-1]
    require_positive("bound", bound)
    columns = torch.arange(size) if columns is None else columns
    if columns.shape != (size,) or (columns.device.type == "cpu" and size and int(columns.max()) >= len(names)):
        raise BadValueError(f"{len(names)} names and columns {tuple(columns.shape)} for observations of {size} numbers")
    flat = observations.flatten(0, -2).double()  # (rows, size)
    index, width = columns.to(flat.device), len(names)
    finite = flat.isfinite()
    values = flat.where(finite, 0.0)

    def total(numbers: Tensor) -> Tensor:
        """Sum over rows and over all numbers of a name."""
        return torch.zeros(width, dtype=torch.float64, device=flat.device).index_add(0, index, numbers.double().sum(0))

    count = total(finite)
    mean = total(values) / count.clamp(min=1)
    gaps = (values - mean[index]).where(finite, 0.0)
    std = (total(gaps.square()) / count.clamp(min=1)).sqrt()
    limits = []
    for fill, reduce in ((torch.inf, "amin"), (-torch.inf, "amax")):
        start = torch.full((width,), fill, dtype=torch.float64, device=flat.device)
        wide = index.expand(flat.shape).flatten()
        limits.append(start.scatter_reduce(0, wide, flat.where(finite, fill).flatten(), reduce))
    figures = fetch(torch.stack([count, total(~finite), total(flat.abs() >= bound), mean, std, *limits]))[0]
    return {name: _column(*row) for name, row in zip(names, figures.T.tolist(), strict=True)}


def _column(
    finite: float, broken: float, bounded: float, mean: float, std: float, low: float, high: float
) -> ColumnStatistics:
    count = int(finite + broken)
    share = bounded / count if count else 0.0
    if not finite:
        return ColumnStatistics(None, None, None, None, share, int(broken), count)
    return ColumnStatistics(mean, std, low, high, share, int(broken), count)
