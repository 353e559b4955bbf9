"""A round in detail: gradients by module, ratios out of bounds, columns of the observation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.simic.agent import TamiyoRolloutBuffer
from esper.simic.control import CLIP
from esper.simic.telemetry.measurements import GradientMonitor, GradientReport, LstmHealth, fetch, gradients_of
from esper.tamiyo import ObservationLayout

JOINT = "joint"  # the name of the ratio of whole actions


@dataclass(frozen=True)
class Offender:
    """One ratio out of bounds."""

    env: int
    step: int
    head: str
    ratio: float
    action: tuple[int, ...]  # the choice of every head; empty without actions


@dataclass(frozen=True)
class RatioReport:
    """Exact counts by head, and the worst offenders: first those that are not finite, then by |ln ratio|."""

    examined: dict[str, int]
    exploded: dict[str, int]  # above the bound, infinity included
    vanished: dict[str, int]
    not_a_number: dict[str, int]
    worst: tuple[Offender, ...]


@dataclass(frozen=True)
class RatioExplosionDiagnostic:
    """Finds the probability ratios of an update that are out of bounds."""

    high: float = 5.0
    """A ratio above this has exploded."""
    low: float = 0.1
    """A ratio below this has vanished."""
    cap: int = 100
    """Offenders to list; the counts are exact regardless."""

    @torch.no_grad()
    def __call__(
        self, ratios: Tensor, mask: Tensor | None = None, actions: Tensor | None = None, heads: Sequence[str] = (JOINT,)
    ) -> RatioReport:
        """Report ratios (envs, steps, heads), or (envs, steps) of joint actions. Device sync: one.

        `mask`, of the same shape, says which ratios count; `actions` (envs, steps, heads) are listed with offenders.
        """
        mask = torch.ones_like(ratios, dtype=torch.bool) if mask is None else mask
        ratios, mask = (tensor.view(*tensor.shape[:2], len(heads)) for tensor in (ratios, mask))
        broken, high, low = ratios.isnan() & mask, (ratios > self.high) & mask, (ratios < self.low) & mask
        counts = torch.stack([flags.sum((0, 1)) for flags in (mask, high, low, broken)])
        # A fixed number of candidates, with healthy ones if there are too few offenders: no shape depends on the data.
        distance = ratios.log().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        badness = distance.where(high | low | broken, -1.0).flatten()
        order = badness.argsort(descending=True, stable=True)[: self.cap]
        taken = torch.zeros((*ratios.shape[:2], 0), device=ratios.device) if actions is None else actions
        rows = taken.flatten(0, 1)[order // len(heads)]
        totals, *columns = fetch(counts, order, badness[order], ratios.flatten()[order], rows)
        worst = []
        for index, bad, ratio, action in zip(*(column.tolist() for column in columns), strict=True):
            if bad >= 0:
                cell, head = divmod(int(index), len(heads))
                worst.append(Offender(*divmod(cell, ratios.shape[1]), heads[head], ratio, tuple(map(int, action))))
        examined, exploded, vanished, nans = (dict(zip(heads, map(int, row), strict=True)) for row in totals.tolist())
        return RatioReport(examined, exploded, vanished, nans, tuple(worst))


@dataclass(frozen=True)
class ColumnStatistics:
    """One column of the observation over a round. Moments cover its finite values; None if there are none."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    at_bound: float  # share of values at the bound or beyond, where the policy no longer sees differences
    not_finite: int
    count: int  # all values


@torch.no_grad()
def observation_statistics(
    observations: Tensor, names: Sequence[str], columns: Tensor | None = None, *, bound: float = CLIP
) -> dict[str, ColumnStatistics]:
    """Statistics by column of normalised observations (…, size). Device sync: one.

    `columns` (size,) maps each value to the index of its name (`ObservationLayout.columns()`); by default, one to one.
    """
    width = len(names)
    columns = torch.arange(width) if columns is None else columns
    flat = observations.flatten(0, -2).double()  # (rows, size)
    index, finite = columns.to(flat.device), flat.isfinite()
    values = flat.where(finite, 0.0)

    def total(numbers: Tensor) -> Tensor:
        return torch.zeros(width, dtype=torch.float64, device=flat.device).index_add(0, index, numbers.double().sum(0))

    count = total(finite)
    mean = total(values) / count.clamp(min=1)
    std = (total((values - mean[index]).where(finite, 0.0).square()) / count.clamp(min=1)).sqrt()
    extremes = []
    for fill, reduce in ((torch.inf, "amin"), (-torch.inf, "amax")):
        start = torch.full((width,), fill, dtype=torch.float64, device=flat.device)
        wide = index.expand(flat.shape).flatten()
        extremes.append(start.scatter_reduce(0, wide, flat.where(finite, fill).flatten(), reduce))
    figures = fetch(torch.stack([count, total(~finite), total(flat.abs() >= bound), mean, std, *extremes]))[0]
    return {name: _column(*row) for name, row in zip(names, figures.T.tolist(), strict=True)}


def _column(finite: float, broken: float, at_bound: float, *moments: float) -> ColumnStatistics:
    count = int(finite + broken)
    mean, std, low, high = moments if finite else [None] * 4
    return ColumnStatistics(mean, std, low, high, at_bound / count if count else 0.0, int(broken), count)


@dataclass(frozen=True)
class DetailReport:
    """One round in detail."""

    gradients: GradientReport  # by module, before clipping, over all minibatches of the update
    ratios: RatioReport  # of heads and of joint actions: for each step, the ratio farthest from 1 in any epoch
    observations: dict[str, ColumnStatistics]  # by column, normalised
    lstm: dict[str, LstmHealth | None]  # the hidden state in the middle of the episode, by task


class Examination:
    """Observes one update: `PPOAgent.update(buffer, examination)`. Its figures stay on the device until `report`."""

    def __init__(self, buffer: TamiyoRolloutBuffer, layout: ObservationLayout) -> None:
        self.buffer, self.layout = buffer, layout
        self._heads = (*buffer.table.names, JOINT)
        self._gradients = GradientMonitor()
        shape = (buffer.n_envs * buffer.capacity, len(self._heads))
        self._log_ratios = torch.zeros(shape, device=buffer.device)
        self._decided = torch.zeros(shape, dtype=torch.bool, device=buffer.device)

    @torch.no_grad()
    def on_minibatch(self, network: nn.Module, cells: Tensor, log_ratios: Tensor, decided: Tensor) -> None:
        """Measure the gradients, and store ratios that are the worst so far. No device sync."""
        self._gradients.add(gradients_of(network))
        joint = log_ratios.where(decided, 0.0).sum(-1, keepdim=True)
        now, before = torch.cat([log_ratios, joint], -1), self._log_ratios[cells]
        # A NaN is the worst value, and stays.
        worse_before = before.isnan() | (now.abs() <= before.abs())
        self._log_ratios[cells] = before.where(worse_before, now)
        self._decided[cells] = torch.cat([decided, decided.any(-1, keepdim=True)], -1)

    def report(self, lstm: Mapping[str, LstmHealth | None]) -> DetailReport:
        """The figures of the update. Device syncs: one each for gradients and ratios, two for observations."""
        buffer, shape = self.buffer, (self.buffer.n_envs, self.buffer.capacity, len(self._heads))
        values, decided = self._log_ratios.exp().view(shape), self._decided.view(shape)
        ratios = RatioExplosionDiagnostic()(values, decided, buffer.actions, self._heads)
        names, columns = self.layout.column_names, self.layout.columns()
        observations = observation_statistics(buffer.observations[buffer.valid], names, columns)
        return DetailReport(self._gradients.report(), ratios, observations, dict(lstm))
