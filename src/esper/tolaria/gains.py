"""What one seed adds to the hosts of each task, as it was measured; `esper tasks` lists it."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

GAINS_FILE = Path(__file__).parent / "task_gains.json"
GAIN_KEYS = ("slot", "blueprint", "parameters", "gain", "deviation")


class Gain(NamedTuple):
    """One seed in one slot: points over the host alone, mean and standard deviation over repeats."""

    slot_id: str
    blueprint: str
    parameters: int
    points: float
    deviation: float


class HostGains(NamedTuple):
    """The gains of all seeds on hosts of one defect."""

    defect: str
    host_accuracy: float
    repeats: int
    gains: tuple[Gain, ...]

    def best(self, slot_id: str) -> Gain:
        """The blueprint that added most in a slot."""
        return max((gain for gain in self.gains if gain.slot_id == slot_id), key=lambda gain: gain.points)


@cache
def published_gains(task: str) -> tuple[HostGains, ...]:
    """The measured gains of a task, one entry per defect; empty if it was not measured."""
    tasks = json.loads(GAINS_FILE.read_text()) if GAINS_FILE.exists() else {}
    by_defect = []
    for defect, figures in tasks.get(task, {"hosts": {}})["hosts"].items():
        gains = tuple(Gain(*(cell[key] for key in GAIN_KEYS)) for cell in figures["cells"])
        by_defect.append(HostGains(defect, figures["host_accuracy"], figures["repeats"], gains))
    return tuple(by_defect)
