"""The pictures of docs/watching.md: the screens of `esper watch`, as PNG, painted by Debian's Chromium.

    esper train --task digits_varied --rounds 14 --hosts 16 --out runs/first
    esper evaluate --task digits_varied --policies runs/first,schedule,heuristic:shipped,random --hosts 16 \\
        --json runs/first/evaluation.json
    python benchmarks/watching_pictures.py runs/first --host 1 --step 6
"""

import argparse
import asyncio
import io
import re
from pathlib import Path

from PIL import Image
from serving import CHROMIUM, FLAGS

from esper.karn.terminal.app import RUNS, SCREENS, WatchApp
from esper.karn.terminal.moment import Watched
from esper.karn.terminal.opening import runs_in

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 100
HEIGHTS = {"overview": 34, "fleet": 14, "host": 36, "decisions": 23, "log": 16, RUNS: 12}
"""Lines of each screen, so that none is mostly empty"""
COLOURS = 256
"""Of a picture; more would only make the files larger"""


def plain(picture: str) -> str:
    """Without fonts from elsewhere."""
    own = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", picture, flags=re.DOTALL)
    return own.replace("Fira Code", "DejaVu Sans Mono")


async def screens(arguments: argparse.Namespace) -> dict[str, str]:
    """An SVG of every screen, by name."""
    found = {}
    app = WatchApp([Watched.of(arguments.run)])
    async with app.run_test(size=(WIDTH, HEIGHTS[SCREENS[0]])) as pilot:
        app.watched.env = arguments.host
        for index, name in enumerate(SCREENS, 1):
            await pilot.resize_terminal(WIDTH, HEIGHTS[name])
            app.watched.follow()
            if name == "host" and arguments.step is not None:
                app.watched.move_step(arguments.step - app.watched.trained)
            await pilot.press(str(index))
            await pilot.pause()
            found[name] = plain(app.export_screenshot(title=f"esper watch {arguments.run}", simplify=True))
    several = WatchApp([Watched.of(run) for run in runs_in(arguments.runs or arguments.run.parent)])
    async with several.run_test(size=(WIDTH, HEIGHTS[RUNS])) as pilot:
        await pilot.pause(1.0)
        if several.shown == RUNS:
            found[RUNS] = plain(several.export_screenshot(title="esper watch runs", simplify=True))
    return found


def save(picture: Image.Image, path: Path) -> None:
    """Write a small PNG and say where it is."""
    few = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def paint(drawings: dict[str, str], out: Path) -> None:
    """Write every SVG as PNG."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for name, drawing in drawings.items():
            page = browser.new_page(viewport={"width": 1100, "height": 900})
            page.set_content(f"<style>body{{margin:0}}svg{{display:block;width:1100px}}</style>{drawing}")
            shot = Image.open(io.BytesIO(page.locator("svg").first.screenshot(omit_background=False)))
            save(shot, out / f"watch-{name}.png")
            page.close()
        browser.close()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--runs", type=Path, help="folder of the list of runs (default: the one that the run is in)")
    parser.add_argument("--host", type=int, default=0, help="the host that is drawn")
    parser.add_argument("--step", type=int, help="where the cursor stands on the screen of the host (default: the end)")
    parser.add_argument("--out", type=Path, default=DOCS)
    arguments = parser.parse_args()
    paint(asyncio.run(screens(arguments)), arguments.out)


if __name__ == "__main__":
    main()
