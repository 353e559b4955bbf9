"""Snapshots of every screen of `esper watch`: each letter and each colour.

`ESPER_SNAPSHOTS=write pytest -m slow tests/karn/test_terminal_snapshots.py` writes them anew; look at what changed.
"""

import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
from karn.terminal_runs import complete_run, drive, grown, live_run
from textual.pilot import Pilot

from esper.karn.terminal import runs_in
from esper.karn.terminal.app import WatchApp

FOLDER = Path(__file__).parent / "snapshots"


def several(path: Path) -> Path:
    """A folder of runs."""
    path.mkdir()
    complete_run(path / "first")
    live_run(path / "second")
    grown(path / "third")
    return path


MADE: dict[str, Callable[[Path], Path]] = {"complete": complete_run, "live": live_run, "grower": grown, "runs": several}
SIZES = ((80, 24), (120, 40))
CASES = [
    *((kind, size, screen) for kind in ("complete", "live", "grower") for size in SIZES for screen in "12345"),
    ("complete", (80, 24), "?"),
    ("runs", (80, 24), "r"),
    ("runs", (120, 40), "r"),
]  # fmt: skip
KEYS = {"?": "question_mark"}


def taken(app: WatchApp) -> str:
    """The screen: its lines, then the colours of each line, as runs of characters."""
    texts, colours = [], []
    for strip in app.screen._compositor.render_strips():
        texts.append(strip.text.rstrip())
        cells = [(str(segment.style.color.name if segment.style and segment.style.color else ""),
                  str(segment.style.bgcolor.name if segment.style and segment.style.bgcolor else ""))
                 for segment in strip for _ in segment.text]  # fmt: skip
        colours.append(" ".join(f"{len(list(run))}×{fore}/{back}" for (fore, back), run in groupby(cells)))
    return "\n".join([*texts, "-" * 20, *colours]) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "screen"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_snapshot(kind: str, size: tuple[int, int], screen: str, tmp_path: Path) -> None:
    """As it was when somebody last looked at it."""
    name = f"{kind}-{size[0]}x{size[1]}-{'help' if screen == '?' else screen}.txt"
    path, seen = MADE[kind](tmp_path / "run"), list[str]()

    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press(KEYS.get(screen, screen))
        await pilot.pause()
        await pilot.pause()
        seen.append(taken(app))

    drive(runs_in(path), look, size=size)
    snapshot = FOLDER / name
    if os.environ.get("ESPER_SNAPSHOTS") == "write":
        FOLDER.mkdir(exist_ok=True)
        snapshot.write_text(seen[0], encoding="utf-8")
    assert seen[0] == snapshot.read_text(encoding="utf-8")
