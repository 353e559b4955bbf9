"""The episode of one host as text and as a picture: a row per slot, a column per step."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from esper.kasmina import SeedState
from esper.leyline import COOLDOWN_STAGES, SeedStage

LETTERS = {
    SeedStage.DORMANT: ".",
    SeedStage.GERMINATED: "g",
    SeedStage.TRAINING: "t",
    SeedStage.BLENDING: "b",
    SeedStage.HOLDING: "h",
    SeedStage.FOSSILIZED: "F",
    **dict.fromkeys(COOLDOWN_STAGES, "x"),
}
LEGEND = ". empty, t trains, b blends in, h holds, F fossil, x cools down"
COLOURS = {
    ".": (235, 235, 235),
    "g": (190, 174, 212),
    "t": (128, 177, 211),
    "b": (253, 180, 98),
    "h": (255, 237, 111),
    "F": (77, 146, 33),
    "x": (150, 150, 150),
}
NOT_YET = (255, 255, 255)
CELL = 16  # pixels


class Timeline:
    """The stages of all slots after every step so far, and the gains."""

    def __init__(self, task: str, slot_ids: tuple[str, ...], steps: int) -> None:
        self.task, self.steps = task, steps
        self.letters = dict.fromkeys(slot_ids, "")
        self.blueprints: dict[str, str | None] = {}  # what grows in each slot now
        self.gains: list[float] = []

    def add(self, states: Mapping[str, SeedState], gain: float) -> None:
        """Add a step."""
        for slot_id, state in states.items():
            self.letters[slot_id] += LETTERS[state.stage]
            self.blueprints[slot_id] = state.blueprint
        self.gains.append(gain)

    def text(self) -> str:
        """A line per slot, with a letter per step and what grows there now."""
        gain = f", gain {self.gains[-1]:+.1f} points" if self.gains else ""
        lines = [f"{self.task}: step {len(self.gains)} of {self.steps}{gain}"]
        width = max(map(len, self.letters))
        for slot_id, letters in self.letters.items():
            line = f"{slot_id:<{width}}  {letters:<{self.steps}}  {self.blueprints.get(slot_id) or ''}"
            lines.append(line.rstrip())
        return "\n".join([*lines, LEGEND])

    def picture(self) -> NDArray[np.uint8]:
        """(height, width, 3): a coloured square per slot and step; steps to come are white."""
        rows = [[COLOURS[letter] for letter in letters] for letters in self.letters.values()]
        cells = np.array([row + [NOT_YET] * (self.steps - len(row)) for row in rows], np.uint8)
        return cells.repeat(CELL, 0).repeat(CELL, 1)
