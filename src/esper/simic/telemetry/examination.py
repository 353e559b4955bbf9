"""How much is recorded: more for a few rounds after an alarm."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

from esper.leyline.numbers import require_whole
from esper.simic.agent import TamiyoRolloutBuffer
from esper.simic.telemetry.alarms import Alarm
from esper.simic.telemetry.gradients import GradientMonitor, GradientReport, gradients_of
from esper.simic.telemetry.lstm import LstmHealth
from esper.simic.telemetry.observations import ColumnStatistics, observation_statistics
from esper.simic.telemetry.ratios import JOINT, RatioExplosionDiagnostic, RatioReport
from esper.tamiyo import ObservationLayout


class DetailLevel(IntEnum):
    """What is measured in a round."""

    NORMAL = 0
    """The update's metrics and counts"""
    DEBUG = 1
    """Also gradients by module, ratios out of bounds, columns of the observation"""


@dataclass(frozen=True)
class Detail:
    """The level of the coming round; plain numbers, for a checkpoint."""

    rounds: int = 5
    """Rounds of debugging after an alarm of severity warning or above."""
    left: int = 0
    """Rounds of debugging to come"""

    def __post_init__(self) -> None:
        require_whole("rounds", self.rounds, 0)
        require_whole("left", self.left, 0)

    @property
    def level(self) -> DetailLevel:
        """Of the coming round."""
        return DetailLevel.DEBUG if self.left else DetailLevel.NORMAL

    def after(self, alarms: Iterable[Alarm]) -> "Detail":
        """The level after a round with these alarms: up again, or one round less of it."""
        raised = any(alarm.severity != "info" for alarm in alarms)
        return Detail(self.rounds, self.rounds if raised else max(0, self.left - 1))


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
        self._gradients = GradientMonitor()
        cells = buffer.n_envs * buffer.capacity
        self._log_ratios = torch.zeros((cells, len(self._heads)), device=buffer.device)
        self._decided = torch.zeros((cells, len(self._heads)), dtype=torch.bool, device=buffer.device)

    @torch.no_grad()
    def on_minibatch(self, network: nn.Module, cells: Tensor, log_ratios: Tensor, decided: Tensor) -> None:
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
