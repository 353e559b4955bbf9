"""What one seed was measured to add to each task's host: the figures that `esper tasks` prints.

Written by `benchmarks/task_gains.py --publish`.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

GAINS_FILE = Path(__file__).parent / "task_gains.json"


@dataclass(frozen=True)
class Gain:
    """One seed in one slot: points over the host alone, mean and standard deviation over repeats."""

    slot_id: str
    blueprint: str
    parameters: int
    points: float
    deviation: float


@dataclass(frozen=True)
class HostGains:
    """All cells of one kind of host."""

    defect: str
    host_accuracy: float
    repeats: int
    gains: tuple[Gain, ...]

    def best(self, slot_id: str) -> Gain:
        """The blueprint that added most in a slot."""
        return max((gain for gain in self.gains if gain.slot_id == slot_id), key=lambda gain: gain.points)


def _gain(cell: dict[str, Any]) -> Gain:  # Any: parsed JSON
    return Gain(cell["slot"], cell["blueprint"], cell["parameters"], cell["gain"], cell["deviation"])


@lru_cache(maxsize=1)
def _published() -> dict[str, tuple[HostGains, ...]]:
    if not GAINS_FILE.exists():
        return {}
    return {
        task: tuple(
            HostGains(
                defect,
                figures["host_accuracy"],
                figures["repeats"],
                tuple(_gain(cell) for cell in figures["cells"]),
            )
            for defect, figures in entry["hosts"].items()
        )
        for task, entry in json.loads(GAINS_FILE.read_text()).items()
    }


def published_gains(task: str) -> tuple[HostGains, ...]:
    """The measured gains of a task, per kind of host; empty where it was not measured."""
    return _published().get(task, ())
