"""Films: what every slot held after each step, where it stands, and what the files and the page show."""

import io
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from karn.run_folders import Page, episode, growth_metrics, metrics, stage, write_growth, write_run
from PIL import Image, ImageSequence

from esper.karn import film_files, read_run, write_film
from esper.karn.film import EMPTY, Film, Frame, SlotState, between, blocks_of, film_of_growth, film_of_host, thin
from esper.karn.film_files import frame_at, to_gif, to_picture
from esper.karn.film_layout import LARGE, PER_ROW, SMALL, WIDTH, Circle, Line, Rect, Text, height, moving, still
from esper.karn.film_page import film_element
from esper.karn.growth import read_growth
from esper.karn.palette import LETTERS, STAGES, ink_on
from esper.leyline import BadValueError, SeedStage, UnknownNameError


@pytest.fixture
def film(tmp_path: Path) -> Film:
    """The best host of the last round: germinated at 2, ticks one later, advance at 4, held from 6, committed at 7."""
    run = read_run(write_run(tmp_path))
    return film_of_host(run, 2)


def many_slots(count: int) -> Film:
    """A network of two steps with as many slots."""
    names = tuple(f"r0c{index}" for index in range(count))
    frames = tuple(Frame(step, (EMPTY,) * count, None, None, "") for step in range(2))
    return Film("many", blocks_of(names), names, frames)


def test_a_host_step_by_step(film: Film) -> None:
    """Each frame has the decisions up to it, and the alpha and accuracy of the step before it."""
    column = film.slots.index("r1c0")
    states = [frame.slots[column] for frame in film.frames]
    assert [state.stage.name[0] for state in states] == list("DDGTBBHFF")
    assert [state.alpha for state in states] == [0, 0, 0, 0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert [state.blueprint for state in states] == [None] * 2 + ["depthwise"] * 7
    assert [frame.score for frame in film.frames] == [None, *(42.0 + step for step in range(8))]
    assert [frame.control for frame in film.frames][:3] == [None, 40.0, 40.5]
    assert {frame.step: frame.note for frame in film.frames if frame.note} == {
        2: "depthwise germinated in r1c0",
        7: "depthwise committed in r1c0",
    }
    assert (film.title, film.slots, film.has_control) == ("digits_hand, round 1, host 2", ("r1c0", "r1c1"), True)


def test_blocks() -> None:
    """One before each slot and one behind the last; row 1 lies behind the pooling of its block."""
    assert blocks_of(["r1c0", "r1c1"]) == ("block 0", "block 1", "output")
    assert blocks_of(["r0c0", "r1c0", "r0c3"]) == ("block 0", "pool 0", "blocks 1-3", "output")
    assert blocks_of(["odd"]) == ("odd", "output")
    assert blocks_of([]) == ("output",)


def test_a_grower_step_by_step(tmp_path: Path) -> None:
    """Its seeds act from the step after their birth on. Steps count from 1; the first frame is before them."""
    film = film_of_growth(read_growth(write_growth(tmp_path)))
    states = [frame.slots[0] for frame in film.frames]
    assert [frame.step for frame in film.frames] == list(range(6))
    assert [state.stage.name[0] for state in states] == list("DBHHFF")
    assert [state.alpha for state in states] == [0, 0, 1, 1, 1, 1]
    assert film.blocks == ("layer1.0", "layer2", "output")
    assert film.frames[1].note == "norm germinated in layer1.0; 600 of 1,000 parameters grown"
    assert "panic" in film.frames[4].note
    assert not film.has_control


def test_a_grower_with_a_loss_of_its_own(tmp_path: Path) -> None:
    """Without accuracies the curve is the loss; one that is not finite is a gap."""
    rows = [growth_metrics(1, accuracy=None), growth_metrics(2, accuracy=None, loss="nan")]
    film = film_of_growth(read_growth(write_growth(tmp_path, rows)))
    assert (film.measure, [frame.score for frame in film.frames]) == ("loss", [None, 2.0, None])
    assert len(to_picture(film)) > 1000


def test_between_two_frames() -> None:
    """Alphas and scores change evenly; a seed that is pruned does not shrink first."""
    blending = SlotState(SeedStage.BLENDING, 0.25, "norm")
    one = Frame(3, (blending, blending), 50.0, None, "note")
    two = Frame(4, (SlotState(SeedStage.HOLDING, 0.75, "norm"), SlotState(SeedStage.PRUNED)), 54.0, 40.0, "")
    assert between(one, two, 0.5) == Frame(3.5, (blending._replace(alpha=0.5), blending), 52.0, None, "note")


def test_long_runs_are_thinned(film: Film) -> None:
    """The first, the last and frames with changes stay, in order; all steps may have changes."""
    quiet = [Frame(step, film.frames[0].slots, 1.0, None, "") for step in range(5000)]
    for step in range(1234, 5000):
        quiet[step] = quiet[step]._replace(slots=film.frames[-1].slots)
    thinned = thin(Film("long", film.blocks, film.slots, tuple(quiet)), 40)
    steps = [int(frame.step) for frame in thinned.frames]
    assert {0, 1234, 4999} <= set(steps)
    assert 20 <= len(steps) <= 40
    assert steps == sorted(set(steps))
    busy = [frame._replace(slots=film.frames[int(frame.step) % 2 * 4].slots) for frame in quiet]
    assert len(thin(Film("busy", film.blocks, film.slots, tuple(busy)), 40).frames) <= 40


def test_seeds_swell_with_alpha(film: Film) -> None:
    """From the small to the large radius, over their slot, with the colour and letter of their stage."""
    slots = (SlotState(SeedStage.BLENDING, 0.5, "norm"), EMPTY)
    shapes = moving(film, film.frames[4]._replace(slots=slots))
    seed, empty = (shape for shape in shapes if isinstance(shape, Circle))
    assert seed.radius == (SMALL + LARGE) / 2
    assert seed.fill == STAGES[SeedStage.BLENDING]
    assert (empty.radius, empty.y) == (SMALL, seed.y)
    texts = {shape.text: shape for shape in shapes if isinstance(shape, Text)}
    assert texts["B"].x == texts["norm"].x == texts["α 0.50"].x == seed.x < empty.x == texts["·"].x


@pytest.mark.parametrize("count", [0, 1, PER_ROW, PER_ROW + 1, 2 * PER_ROW, 24])
def test_everything_stands_inside_the_picture(count: int) -> None:
    """For any number of slots; and no two blocks lie on each other."""
    film = many_slots(count)
    shapes = [*still(film), *moving(film, film.frames[-1])]
    for shape in shapes:
        places = shape.points if isinstance(shape, Line) else [(shape.x, shape.y)]
        assert all(0 <= x <= WIDTH and 0 <= y <= height(film) for x, y in places), shape
    blocks = [shape for shape in still(film) if isinstance(shape, Rect)]
    assert len(blocks) == count + 1
    assert len({(block.x, block.y) for block in blocks}) == count + 1
    assert all(block.x + block.width <= WIDTH for block in blocks)


def test_moving_shapes_keep_their_places(film: Film) -> None:
    """The script of a page sets the attributes of the shape at the same place."""
    kinds = [[type(shape) for shape in moving(film, frame)] for frame in film.frames]
    assert all(one == two for one, two in pairwise(kinds))


def test_letters_of_stages_are_readable() -> None:
    """All differ, and stand out from their colour with a contrast of at least 4.5 (WCAG AA)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert len(set(LETTERS.values())) == len(SeedStage)
    for stage_, colour in STAGES.items():
        dark, light = sorted((luminance(colour), luminance(ink_on(colour))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, stage_


@pytest.fixture
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Films of two pictures a step."""
    monkeypatch.setattr(film_files, "PICTURES", 16)


@pytest.mark.usefixtures("few_pictures")
def test_a_film_as_gif(film: Film) -> None:
    """Runs for ever, rests at the end, and its pictures show the seed growing."""
    with Image.open(io.BytesIO(to_gif(film))) as picture:
        assert picture.info["loop"] == 0
        frames = [np.asarray(frame.convert("RGB"), dtype=int) for frame in ImageSequence.Iterator(picture)]
        assert picture.info["duration"] >= 2000
    assert len(frames) == 17

    def area(stage: SeedStage, frame: npt.NDArray[np.int_]) -> int:
        colour = [int(STAGES[stage][place : place + 2], 16) for place in (1, 3, 5)]
        return int((np.abs(frame - colour).sum(axis=-1) < 20).sum())

    committed = SeedStage.FOSSILIZED
    assert area(committed, frames[-1]) > area(committed, frames[0]) + 1000  # at first only in the legend
    assert all(area(stage, frames[0]) > 50 for stage in film.stages if stage in STAGES)


@pytest.mark.usefixtures("few_pictures")
def test_files(tmp_path: Path) -> None:
    """GIF or PNG by the name; a host by number or rank, one step by number."""
    run = write_run(tmp_path / "run")
    assert write_film(run, tmp_path / "a.png", host=2).read_bytes().startswith(b"\x89PNG")
    early = write_film(run, tmp_path / "b.PNG", host="best", step=3).read_bytes()
    assert early != (tmp_path / "a.png").read_bytes() == write_film(run, tmp_path / "c.png").read_bytes()
    growth = write_growth(tmp_path / "growth")
    assert write_film(growth, tmp_path / "d.gif").read_bytes().startswith(b"GIF89a")
    with pytest.raises(BadValueError, match=r"a\.mp4 is no name for a film; let it end in \.gif or \.png"):
        write_film(run, tmp_path / "a.mp4")
    with pytest.raises(BadValueError, match="no host 9 in this round; its hosts are 0, 1, 2, 3"):
        write_film(run, tmp_path / "e.gif", host=9)
    with pytest.raises(UnknownNameError, match="bets"):
        write_film(run, tmp_path / "e.gif", host="bets")  # type: ignore[arg-type]  # a slip
    with pytest.raises(BadValueError, match="has one model; omit host and round"):
        write_film(growth, tmp_path / "e.gif", host=0)


def test_frames_by_step(film: Film) -> None:
    """The last at or before a step; before the first there is the first."""
    assert [frame_at(film, step).step for step in (-1, 0, 3, 99)] == [0, 0, 3, 8]


def test_on_the_page(film: Film) -> None:
    """The last step is drawn; the tracks hold every change of every moving shape, and nothing else."""
    page = Page(film_element(film, "one", "A caption."))
    data = json.loads(page.text("div"))
    assert data["steps"] == list(range(9))
    assert len(data["tracks"]) == len(moving(film, film.frames[0]))
    column = [isinstance(shape, Circle) for shape in moving(film, film.frames[0])].index(True)
    radii = [(frame, float(values["r"])) for frame, values in data["tracks"][column]]
    assert radii[0] == (0, SMALL)
    assert (4, (SMALL + LARGE) / 2) in radii
    assert (5, LARGE) in radii
    (slider,) = [attributes for tag, attributes in page.tags if tag == "input"]
    assert (slider["min"], slider["max"], slider["value"]) == ("0", "8", "8")
    assert "step 8 of 8" in page.text("text")


def test_hostile_names(tmp_path: Path) -> None:
    """Text stays text: in the drawing, in the script's values, and in pictures."""
    name = "</script><img src=x onerror=alert(1)>\x1b[2J"
    events = [episode(0, 0, 1.0, [stage(0, 1, 0, name, "DORMANT", "GERMINATED", "germinate", name)])]
    run = read_run(write_run(tmp_path, [metrics(0)], events, task=name))
    film = film_of_host(run, 0)
    text = film_element(film, "one", "A caption.")
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"img"})
    assert "<script" not in text
    assert "\x1b" not in text
    assert len(to_picture(film)) > 1000
