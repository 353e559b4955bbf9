"""The pictures of docs/serving.md: pages of `esper serve`, as PNG, painted by Debian's Chromium.

Make the run as `watching_pictures.py` says, then:

    python benchmarks/serving_pictures.py runs/first --host 1 --step 10
"""

import argparse
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from serving import CHROMIUM, FLAGS, PORT, wait_for
from watching_pictures import DOCS, save

from esper.karn.browser.asked import Asked

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ADDRESS = f"http://localhost:{PORT}"
PHONE, GAP = (390, 760), 20
GREY = "#868e96"
"""Between the screens of the phone"""


@contextmanager
def served(root: Path) -> Iterator[None]:
    """Serve a folder while the block runs."""
    server = subprocess.Popen([sys.executable, "-m", "esper", "serve", str(root), "--port", str(PORT)])
    try:
        wait_for(ADDRESS)
        yield
    finally:
        server.terminate()
        server.wait()


def taken(browser: "Browser", asked: Asked, size: tuple[int, int]) -> Image.Image:
    """The top of a page."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.goto(f"{ADDRESS}{asked.link()}")
    page.wait_for_load_state("networkidle")
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    return shot


def beside(shots: list[Image.Image]) -> Image.Image:
    """Screens of a phone side by side."""
    (width, height), count = PHONE, len(shots)
    whole = Image.new("RGB", (count * width + (count - 1) * GAP, height), GREY)
    for index, shot in enumerate(shots):
        whole.paste(shot, (index * (width + GAP), 0))
    return whole


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--host", type=int, help="the host that is drawn (default: the best)")
    parser.add_argument("--step", type=int, help="where its slider stands (default: the end)")
    parser.add_argument("--out", type=Path, default=DOCS)
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    host = Asked(arguments.run.name, "host", host=arguments.host)
    fleet = host._replace(view="fleet", host=None)
    with served(arguments.run.parent), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        pictures = {
            "host": taken(browser, host._replace(step=arguments.step), (900, 1180)),
            "fleet": taken(browser, fleet, (720, 780)),
            "phone": beside([taken(browser, each, PHONE) for each in (fleet._replace(view="overview"), fleet, host)]),
        }
        browser.close()
    for name, picture in pictures.items():
        save(picture, arguments.out / f"serving-{name}.png")


if __name__ == "__main__":
    main()
