"""The pictures of docs/watching.md: the screens of `esper watch`, as SVG.

esper train --rounds 10 --out runs/first
esper evaluate --policies runs/first,heuristic:shipped,random,wait --hosts 12 --json runs/first/evaluation.json
python benchmarks/watching_pictures.py runs/first
"""

import argparse
import asyncio
import re
from pathlib import Path

from esper.karn.terminal.app import SCREENS, WatchApp
from esper.karn.terminal.moment import Watched

DOCS = Path(__file__).parents[1] / "docs"
SIZE = (100, 30)
LARGEST = 100 * 1024
"""Bytes of one picture"""


def plain(picture: str) -> str:
    """Without fonts from elsewhere: any monospaced one does."""
    own = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", picture, flags=re.DOTALL)
    return own.replace("Fira Code", "DejaVu Sans Mono")


async def draw(run: Path, out: Path, host: int, step: int | None) -> list[Path]:
    """Write a picture of every screen."""
    app, written = WatchApp([Watched.of(run)]), []
    async with app.run_test(size=SIZE) as pilot:
        app.watched.env = host
        for index, name in enumerate(SCREENS, 1):
            if name == "host" and step is not None:
                app.watched.move_step(step - app.watched.trained)
            await pilot.press(str(index))
            await pilot.pause()
            path = out / f"watch-{name}.svg"
            picture = plain(app.export_screenshot(title=f"esper watch {run}", simplify=True))
            if len(picture.encode()) > LARGEST:
                raise SystemExit(f"{path} would have {len(picture.encode()):,} bytes; make SIZE smaller")
            path.write_text(picture)
            written.append(path)
    return written


def main() -> None:
    """Write the pictures and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--host", type=int, default=0, help="the host that is drawn")
    parser.add_argument("--step", type=int, help="where the cursor stands on the screen of the host (default: the end)")
    parser.add_argument("--out", type=Path, default=DOCS)
    arguments = parser.parse_args()
    for path in asyncio.run(draw(arguments.run, arguments.out, arguments.host, arguments.step)):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
