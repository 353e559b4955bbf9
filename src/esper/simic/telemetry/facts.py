"""What the detector is told of a round beside the update's metrics."""

from dataclasses import dataclass, fields

from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole
from esper.simic.telemetry.gradients import GradientReport
from esper.simic.telemetry.lstm import LstmHealth
from esper.simic.telemetry.ratios import RatioReport


@dataclass(frozen=True)
class RoundFacts:
    """Counts over a round's episodes. What was not measured is None, and raises no alarm and ends none."""

    episodes: int | None = None
    committed: int | None = None
    """Episodes with a committed seed"""
    germinated: int | None = None
    """Seeds"""
    panics: int | None = None
    """Of the governor"""
    acting: int | None = None
    """Acting seeds with a measured contribution, counted in every step; of these are …"""
    hacking: int | None = None
    """… suspected of reward hacking"""
    ransomware: int | None = None
    """… suspected of ransomware (`esper.simic.rewards.detect`)"""
    worst_hacking: str = ""
    """The worst of them, in words"""
    worst_ransomware: str = ""
    lstm: LstmHealth | None = None
    """In mid-episode"""
    gradients: GradientReport | None = None
    ratios: RatioReport | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, LstmHealth | GradientReport | RatioReport | str):
                require_whole(field.name, value, 0)
        if self.committed is not None and self.committed > (self.episodes or 0):
            raise BadValueError(f"{self.committed} committed of {self.episodes} episodes; give both")
        if (self.hacking or 0) + (self.ransomware or 0) > (self.acting or 0):
            raise BadValueError(
                f"{self.hacking} hacking and {self.ransomware} ransomware of {self.acting} acting seeds"
            )

    def per_episode(self, count: int | None) -> float | None:
        """A count over the number of episodes, where both are known."""
        return count / self.episodes if count is not None and self.episodes else None
