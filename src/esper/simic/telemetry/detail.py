"""How much is recorded: more for a few rounds after an alarm."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from esper.leyline.numbers import require_whole
from esper.simic.telemetry.alarms import Alarm


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
