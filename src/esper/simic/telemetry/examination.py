"""What is measured of a round at the level of debugging: a close look at its update, from beside it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.simic.agent import TamiyoRolloutBuffer
from esper.simic.telemetry.gradients import GradientReport, GradientWatch, gradients_of
from esper.simic.telemetry.lstm import LstmHealth
from esper.simic.telemetry.observations import ColumnStatistics, observation_statistics
from esper.simic.telemetry.ratios import JOINT, RatioExplosionDiagnostic, RatioReport
from esper.tamiyo import ObservationLayout


@dataclass(frozen=True)
class DetailReport:
    """One round in detail."""

    gradients: GradientReport
    """By module, before clipping, over all minibatches of the update"""
    ratios: RatioReport
    """Of heads and of joint actions; each step with the ratio that was farthest from 1 in any epoch"""
    observations: dict[str, ColumnStatistics]
    """By column, as the policy saw them"""
    lstm: dict[str, LstmHealth | None]
    """The memory in mid-episode, by task"""


class Examination:
    """Observes one update (`PPOAgent.update(buffer, examination)`); on the device until `report` is asked for."""

    def __init__(self, buffer: TamiyoRolloutBuffer, layout: ObservationLayout) -> None:
        self.buffer, self.layout = buffer, layout
        self._heads = (*buffer.table.names, JOINT)
        self._gradients = GradientWatch()
        cells = buffer.n_envs * buffer.capacity
        self._log_ratios = torch.zeros((cells, len(self._heads)), device=buffer.device)
        self._decided = torch.zeros((cells, len(self._heads)), dtype=torch.bool, device=buffer.device)

    @torch.no_grad()
    def see_minibatch(self, network: nn.Module, cells: Tensor, log_ratios: Tensor, decided: Tensor) -> None:
        """Its gradients by module; its ratios where they are the worst so far. No host sync."""
        self._gradients.add(gradients_of(network))
        joint = log_ratios.where(decided, 0.0).sum(-1, keepdim=True)
        now, before = torch.cat([log_ratios, joint], -1), self._log_ratios[cells]
        # A NaN is the worst there is, and stays.
        kept = before.isnan() | (now.abs() <= before.abs())
        self._log_ratios[cells] = before.where(kept, now)
        self._decided[cells] = torch.cat([decided, decided.any(-1, keepdim=True)], -1)

    def report(self, lstm: Mapping[str, LstmHealth | None]) -> DetailReport:
        """Everything. Host syncs: one each for gradients and ratios, two for observations."""
        buffer, shape = self.buffer, (self.buffer.n_envs, self.buffer.capacity, len(self._heads))
        ratios = RatioExplosionDiagnostic()(
            self._log_ratios.exp().view(shape), self._decided.view(shape), buffer.actions, self._heads
        )
        seen = buffer.observations[buffer.valid]
        names, columns = self.layout.column_names, self.layout.columns()
        return DetailReport(self._gradients.report(), ratios, observation_statistics(seen, names, columns), dict(lstm))
