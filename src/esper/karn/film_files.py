"""Films as files: an animated GIF, or one moment as a PNG. Pillow draws the shapes of `film_layout`."""

import io
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from esper.karn.film import Film, Frame, between
from esper.karn.film_layout import WIDTH, Circle, Line, Rect, Shape, height, moving, still
from esper.karn.palette import PAPER, STAGES
from esper.leyline import BadValueError
from esper.storage.files import replace_file

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

SCALE = 1.25
"""Pixels of a picture per unit"""
FINE = 2
"""Pictures are drawn this much larger and then reduced, which smooths their edges"""
PICTURES = 96
"""Pictures of a film, at most twice as many for a long run"""
SECONDS, REST_MS = 9.0, 2500
"""How long a film runs, and how long it rests at its end"""
COLOURS = 64
SUFFIXES = (".gif", ".png")


def save_film(film: Film, path: Path, step: int | None = None) -> None:
    """Write a film as GIF, or its last moment or that of `step` as PNG; the name says which."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadValueError(f"{path} is no name for a film; let it end in {' or '.join(SUFFIXES)}")
    replace_file(path, to_gif(film) if path.suffix.lower() == ".gif" else to_picture(film, step))


def to_picture(film: Film, step: int | None = None) -> bytes:
    """A PNG of one moment (default: the last)."""
    written = io.BytesIO()
    _Drawing(film).at(film.frames[-1] if step is None else frame_at(film, step)).save(written, "PNG", optimize=True)
    return written.getvalue()


def to_gif(film: Film) -> bytes:
    """An animated GIF that runs again and again."""
    from PIL import Image

    drawing, frames = _Drawing(film), _smooth(film)
    last = drawing.at(frames[-1])
    palette = _palette([drawing.at(frames[0]), last])
    pictures = [drawing.at(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    each = max(20, round(1000 * SECONDS / len(frames) / 10) * 10)
    times = [each] * (len(frames) - 1) + [REST_MS]
    written = io.BytesIO()
    pictures[0].save(
        written, "GIF", save_all=True, append_images=pictures[1:], duration=times, loop=0, optimize=False, disposal=1
    )
    return written.getvalue()


def _palette(samples: "list[Image]") -> "Image":
    """One palette for all pictures of a film. Every stage has its own colour in it, however small its seeds are."""
    from PIL import Image

    wide, tall = samples[0].size
    together = Image.new("RGB", (wide, tall * len(samples) + 20 * len(STAGES)), PAPER)
    for index, sample in enumerate(samples):
        together.paste(sample, (0, index * tall))
    for index, colour in enumerate(STAGES.values()):
        together.paste(colour, (0, tall * len(samples) + 20 * index, wide, tall * len(samples) + 20 * (index + 1)))
    return together.quantize(COLOURS)


def frame_at(film: Film, step: float) -> Frame:
    """The last frame at or before a step."""
    return max((frame for frame in film.frames if frame.step <= step), default=film.frames[0])


def _smooth(film: Film) -> list[Frame]:
    """Frames with others between them."""
    parts = max(1, PICTURES // max(1, len(film.frames) - 1))
    frames = [between(one, two, part / parts) for one, two in pairwise(film.frames) for part in range(parts)]
    frames = frames[:: -(-len(frames) // (2 * PICTURES)) or 1]
    return [*frames, film.frames[-1]]


class _Drawing:
    """A film with its still parts drawn once."""

    def __init__(self, film: Film) -> None:
        from PIL import Image

        self.film, self.scale = film, SCALE * FINE
        self.size = round(WIDTH * SCALE), round(height(film) * SCALE)
        self.ground = Image.new("RGB", (FINE * self.size[0], FINE * self.size[1]), PAPER)
        self._draw(self.ground, still(film))

    def at(self, frame: Frame) -> "Image":
        """One picture."""
        from PIL import Image

        picture = self.ground.copy()
        self._draw(picture, moving(self.film, frame))
        return picture.resize(self.size, Image.Resampling.BOX)

    def _draw(self, picture: "Image", shapes: list[Shape]) -> None:
        from PIL import ImageDraw

        draw = ImageDraw.Draw(picture, "RGBA")
        for shape in shapes:
            if isinstance(shape, Rect):
                self._rectangle(draw, shape)
            elif isinstance(shape, Circle):
                x, y, r = (self.scale * value for value in shape[:3])
                draw.ellipse((x - r, y - r, x + r, y + r), shape.fill, shape.stroke, round(1.2 * self.scale))
            elif isinstance(shape, Line):
                self._line(draw, shape)
            elif shape.text:
                font = _font(round(shape.size * self.scale), shape.bold)
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                draw.text((self.scale * shape.x, self.scale * shape.y), shape.text, shape.fill, font, anchor)

    def _rectangle(self, draw: "ImageDraw", shape: Rect) -> None:
        x, y, width, tall = (self.scale * value for value in shape[:4])
        fill = f"{shape.fill}{round(255 * shape.opacity):02x}"
        if width >= 1:
            draw.rounded_rectangle((x, y, x + width, y + tall), self.scale * shape.round, fill)

    def _line(self, draw: "ImageDraw", shape: Line) -> None:
        points = [(self.scale * x, self.scale * y) for x, y in shape.points]
        width = max(1, round(self.scale * shape.width))
        for one, two in _dashes(points, 5 * self.scale) if shape.dashed else pairwise(points):
            draw.line((*one, *two), shape.stroke, width)


def _dashes(points: list[tuple[float, float]], length: float) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Pieces of a line, `length` drawn and as much omitted."""
    pieces, walked = list[tuple[tuple[float, float], tuple[float, float]]](), 0.0
    for (x, y), (to_x, to_y) in pairwise(points):
        whole = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        at = 0.0
        while at < whole:
            end = min(whole, at + length - walked % length)
            if walked // length % 2 == 0:
                one, two = ((x + (to_x - x) * d / whole, y + (to_y - y) * d / whole) for d in (at, end))
                pieces.append((one, two))
            walked, at = walked + max(1e-6, end - at), max(end, at + 1e-6)
    return pieces


@cache
def _font(size: int, bold: bool) -> "FreeTypeFont":
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans{'-Bold' if bold else ''}.ttf", size)
