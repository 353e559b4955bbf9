"""Pages in Debian's Chromium: nothing fails there, nothing is loaded from elsewhere, everything can be reached."""

import json
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from karn.browser.serving import CHROMIUM, FLAGS, server
from karn.run_folders import (
    default_events,
    episode,
    evaluation,
    growth_events,
    growth_metrics,
    metrics,
    stage,
    write_growth,
    write_lines,
    write_run,
)
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from esper.karn.browser.asked import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra `all`")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's Chromium in {CHROMIUM}: apt install chromium"),
]
HOSTILE = "<img src=x onerror=\"console.error('ran')\"><script>console.error('ran')</script>"
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def chromium() -> Iterator["Browser"]:
    """One browser for all tests."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind, and one with hostile texts."""
    folder = tmp_path_factory.mktemp("served")
    write_run(folder / "trained")
    (folder / "trained" / "evaluation.json").write_text(json.dumps(evaluation()))
    write_growth(folder / "grown")
    events = [episode(0, 0, 1.0, [stage(0, 1, 0, HOSTILE, "DORMANT", "GERMINATED", "germinate", HOSTILE)])]
    write_run(folder / "hostile", [metrics(0)], events, task=HOSTILE)
    return folder


@pytest.fixture(scope="module")
def address(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of these runs."""
    with server(root, tmp_path_factory.mktemp("cache")) as found:
        yield found.rstrip("/")


@pytest.fixture
def page(chromium: "Browser", address: str) -> Iterator["Page"]:
    """A page that fails the test if anything went wrong in it, or came from elsewhere."""
    wrong: list[str] = []
    opened = chromium.new_page(viewport={"width": 390, "height": 800})
    opened.set_default_timeout(WAIT_MS)
    opened.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: wrong.append(request.url) if not is_own(request.url, address) else None)
    yield opened
    opened.close()
    assert wrong == []


def is_own(url: str, address: str) -> bool:
    """Whether a request goes to this server or nowhere."""
    return urlsplit(url).scheme in ("data", "blob") or urlsplit(url).netloc == urlsplit(address).netloc


def show(page: "Page", address: str) -> None:
    """Open an address and wait for its content."""
    page.goto(address)
    page.wait_for_selector(".view > *")


def text_of(shown: "Locator") -> str:
    """The text of the one element that is meant."""
    text: str | None = shown.text_content()
    assert text is not None
    return text


PAGES = [f"/run?run={run}&view={view}" for run in ("trained", "grown", "hostile") for view in VIEWS]


@pytest.mark.parametrize("path", ["/", "/compare?run=trained&run=grown", *PAGES])
def test_every_page_on_a_phone(page: "Page", address: str, path: str) -> None:
    """No horizontal scrolling, and every control lies within the width of the screen; nor on a desktop."""
    show(page, address + path)
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for control in page.locator("a:visible, button:visible, input:visible, select:visible, textarea:visible").all():
            box = control.bounding_box()
            assert box is not None
            assert box["x"] >= 0, control.inner_text()
            assert box["x"] + box["width"] <= width + 0.5, control.inner_text()
    assert page.locator(".view img").count() == 0


def test_scrubbing(page: "Page", address: str) -> None:
    """The slider moves through the steps; the address and the link of the picture follow, and lead back there."""
    show(page, f"{address}/run?run=trained&view=host&round=1&host=2")
    drawing, slider = page.locator(".film svg").first, page.locator(".film input")
    assert "step 8 of 8" in text_of(drawing)
    for step, shown in (("4", "α 0.50"), ("5", "α 1.00"), ("2", "depthwise germinated in r1c0")):
        slider.fill(step)
        assert shown in text_of(drawing)
        assert f"step {step} of 8" in text_of(drawing)
    slider.fill("5")
    assert "step=5" in page.url
    show(page, page.url)
    assert "step 5 of 8" in text_of(page.locator(".film svg").first)
    slider = page.locator(".film input")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert "step 4 of 8" in text_of(page.locator(".film svg").first)


def test_playing(page: "Page", address: str) -> None:
    """From the first step to the last, then it stops."""
    show(page, f"{address}/run?run=grown&view=host")
    button = page.locator(".film button")
    button.click()
    assert "stop" in text_of(button)
    page.wait_for_function("document.querySelector('.film button').textContent.includes('play')")
    assert page.locator(".film input").input_value() == "5"


def test_saving(page: "Page", address: str) -> None:
    """The step that is shown as PNG, all of them as GIF."""
    show(page, f"{address}/run?run=trained&view=host&round=1&host=2")
    pictures = []
    for step in ("2", "8"):
        page.locator(".film input").fill(step)
        with page.expect_download() as caught:
            page.get_by_text("save this step as PNG").click()
        pictures.append(Path(caught.value.path()).read_bytes())
        assert caught.value.suggested_filename == "growth.png"
    assert pictures[0] != pictures[1]
    with page.expect_download() as caught:
        page.get_by_text("save the film as GIF").click()
    with Image.open(BytesIO(Path(caught.value.path()).read_bytes())) as film:
        assert isinstance(film, GifImageFile) and film.is_animated


def test_controls(page: "Page", address: str) -> None:
    """Other rounds, hosts, runs and views are addresses."""
    show(page, f"{address}/")
    page.get_by_label("compare trained").check()
    page.get_by_label("compare grown").check()
    page.get_by_text("compare the chosen runs").click()
    page.wait_for_selector("text=Controllers")
    page.get_by_text("all runs").click()
    page.get_by_role("link", name="trained").click()
    page.get_by_role("link", name="Host", exact=True).click()
    page.locator("select[name=host]").select_option("0")
    page.get_by_text("show", exact=True).click()
    page.wait_for_selector("text=round 1, host 0")
    page.get_by_text("round before").click()
    page.wait_for_selector("text=round 0, host")
    page.get_by_role("link", name="SQL", exact=True).click()
    page.locator("textarea").fill("select env, gain from episodes order by gain desc limit 1")
    page.get_by_role("button", name="run").click()
    page.wait_for_selector("text=1 row;")
    assert "sql=select" in page.url


def test_a_live_run(page: "Page", address: str, root: Path) -> None:
    """A page follows its run without being loaded again: steps, rounds, a step that the reader chose; then the run is
    deleted."""
    run = write_run(root / "living", [metrics(0)], default_events(1))
    show(page, f"{address}/run?run=living&view=host&round=0&host=2")
    page.locator(".film input").fill("5")
    page.evaluate("window.loadedOnce = true")
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({**event, "round": 1}) + "\n" for event in default_events(1))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(1)) + "\n")
    page.wait_for_selector("text=2 of 3 rounds")
    assert "step 5 of 8" in text_of(page.locator(".film svg").first)
    step = {
        "kind": "step", "time": 1.0, "round": 2, "task": "digits_hand", "step": 0, "steps": 8, "first_env": 0,
        "slots": ["r1c0"], "accuracies": [50.0], "control_accuracies": [45.0], "gains": [5.0], "losses": [1.0],
        "seeds": [], "actions": [], "probabilities": [0.5], "choices": [], "changes": [], "panics": [],
    }  # fmt: skip
    write_lines(run / "live.jsonl", [{"kind": "live", "version": 1, "round": 2, "began": 5}, step])
    page.wait_for_selector("text=round 2 is being played: step 1 of 8")
    assert page.evaluate("window.loadedOnce")
    show(page, f"{address}/run?run=living&view=fleet")
    assert "+5.0" in text_of(page.locator(".fleet"))
    shutil.rmtree(run)
    page.wait_for_selector("text=This run was deleted")


def test_a_growing_model(page: "Page", address: str, root: Path) -> None:
    """The run of a Grower is followed too."""
    run = write_growth(root / "living-model", [growth_metrics(1)], growth_events()[:3])
    show(page, f"{address}/run?run=living-model&view=host")
    assert "step 1 of 1" in text_of(page.locator(".film svg").first)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(growth_metrics(2)) + "\n")
    page.wait_for_selector(".film svg >> text=step 2 of 2")


def test_the_token(chromium: "Browser", root: Path, tmp_path: Path) -> None:
    """Without it nothing is shown; with it, pages work and the address no longer has it."""
    with server(root, tmp_path, "--token") as address:
        bare, _, token = address.partition("?token=")
        stranger = chromium.new_context().new_page()
        for path in ("", "run?run=trained", "film?run=trained", "?token=wrong", "_nicegui_ws/socket.io/"):
            answer = stranger.goto(bare + path)
            assert answer is not None
            assert answer.status == 401, path
            assert "trained" not in stranger.content()
        page = chromium.new_context().new_page()
        page.set_default_timeout(WAIT_MS)
        show(page, address)
        assert token not in page.url
        page.get_by_role("link", name="trained").click()
        page.wait_for_selector("text=2 of 3 rounds")
        page.wait_for_function("window.socket && window.socket.connected")


def test_the_report(page: "Page", root: Path, tmp_path: Path) -> None:
    """The slider of a report works from a file, without a server."""
    from esper.karn import write_report

    written = write_report(root / "trained", tmp_path / "report.html", hosts=1)
    page.set_content(written.read_text())
    page.locator(".film input").fill("5")
    assert "step 5 of 8" in text_of(page.locator(".film svg").first)
