"""`esper watch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.karn.terminal import SPEED, watch


@dataclass(frozen=True)
class WatchCommand:
    """Watch a run in the terminal while it trains, or afterwards: its curves, hosts, decisions and alarms.

    It reads the folder only. Keys are shown at the bottom; the mouse works too, and NO_COLOR is respected.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or a folder with runs, which are shown side by side."""
    replay: bool = False
    """Show it again from the first round, step by step."""
    speed: float = SPEED
    """Steps per second of the replay."""
    round: int | None = None
    """The round to show or to begin with, counted from 0."""

    def run(self, console: Console) -> None:
        """Show it until q is pressed."""
        watch(self.folder, replay=self.replay, speed=self.speed, round=self.round)
