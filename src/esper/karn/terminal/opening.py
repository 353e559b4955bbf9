"""Finding runs and showing them. Textual is imported when the app begins, so that help needs none of it."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from esper.karn.state import CONFIG
from esper.leyline import BadValueError, MissingPackageError
from esper.leyline.numbers import require_positive, require_whole

SPEED = 4.0
"""Steps per second of a replay"""


def runs_in(path: Path) -> list[Path]:
    """The run itself, or the runs in a folder."""
    if not path.is_dir():
        raise BadValueError(f"{path} is no run folder: there is no such folder")
    if (path / CONFIG).is_file():
        return [path]
    runs = sorted(each.parent for each in path.glob(f"*/{CONFIG}"))
    if not runs:
        raise BadValueError(
            f"{path} is no run folder, and no folder of runs: neither it nor what it holds has {CONFIG}"
        )
    return runs


def watch(path: Path, *, replay: bool = False, speed: float = SPEED, round: int | None = None) -> None:
    """Show the run in a folder, or the runs of a folder side by side, until the user quits."""
    require_positive("speed", speed)
    if round is not None:
        require_whole("round", round, 0)
    runs = runs_in(path)
    if find_spec("textual") is None:
        raise MissingPackageError("esper watch", "textual", "esper-morph[watch]")
    if not sys.stdout.isatty():
        raise BadValueError("esper watch draws on a terminal, but its output goes elsewhere; use esper report instead")
    import_module(f"{__package__}.app").show(runs, replay=replay, speed=speed, round=round)
