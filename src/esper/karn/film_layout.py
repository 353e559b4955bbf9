"""Where the parts of a film stand: a frame as simple shapes, which SVG and pictures draw alike.

```text
        blueprint                      a seed hangs over its slot and swells with alpha;
           (T)                         its colour and letter are its stage
 [block 0]──┴──[block 1]──┴──[output]  the host; an empty slot is a dashed ring
          r1c0
```

Units are pixels of the page at its full width. Shapes in `still` never change; those in `moving` keep their place in
the list from frame to frame.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from esper.karn.film import Film, Frame, SlotState
from esper.karn.palette import BLUE, FAINT, INK, LETTERS, MUTED, PAPER, STAGES, ink_on
from esper.leyline import LIVE_STAGES, SeedStage
from esper.leyline.records import printable

PER_ROW = 3
"""Slots in a row; with more, text would be too small on a phone"""
BLOCK, GAP, HALF = 78.0, 78.0, 23.0
"""Width of a block, room for a slot, half the height of a block"""
SMALL, LARGE = 9.0, 24.0
"""Radius of a seed at alpha 0 and 1"""
LIFT, ROW = 54.0, 152.0
"""Height of a seed over its slot; of a row"""
HEAD, NOTE, CHART = 34.0, 24.0, 96.0
MARGIN = 14.0
WIDTH = 2 * MARGIN + PER_ROW * (BLOCK + GAP) + BLOCK
LEFT, RIGHT = 40.0, 128.0
"""Room beside the chart: for its scale, and for what its curves stand at"""
_KEYS_PER_ROW = 4


class Rect(NamedTuple):
    """A rectangle with round corners."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    round: float = 0.0
    opacity: float = 1.0


class Circle(NamedTuple):
    """A disk."""

    x: float
    y: float
    radius: float
    fill: str
    stroke: str


class Line(NamedTuple):
    """Points joined by a line."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 2.0
    dashed: bool = False


class Text(NamedTuple):
    """A line of text; `y` is its base."""

    x: float
    y: float
    text: str
    size: float = 13.0
    fill: str = INK
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Rect | Circle | Line | Text


def height(film: Film) -> float:
    """Of the whole picture."""
    return _chart_top(film) + CHART + 26 + 22 * -(-len(_keys(film)) // _KEYS_PER_ROW) + MARGIN


def still(film: Film) -> list[Shape]:
    """The host, the curves and the legend."""
    return [*_host(film), *_curves(film), *_legend(film)]


def moving(film: Film, frame: Frame) -> list[Shape]:
    """What changes: seeds, the veil over the future, and numbers."""
    shapes: list[Shape] = [
        Text(WIDTH - MARGIN, 24, f"step {int(frame.step)} of {int(film.last)}", 14, INK, "end"),
        Text(MARGIN, HEAD + NOTE - 8, clip(frame.note, 66), 12.5, MUTED),
    ]
    for index, state in enumerate(frame.slots):
        shapes += _seed(*_slot_at(index), state)
    return shapes + _now(film, frame)


def clip(text: str, letters: int) -> str:
    """Text of at most so many letters, control characters escaped."""
    shown = printable(text)
    return shown if len(shown) <= letters else f"{shown[: letters - 1]}…"


# -- the network ------------------------------------------------------------------------------------------------------


def _block_at(index: int) -> tuple[float, float]:
    """Left end and middle of a block."""
    row, column = divmod(index, PER_ROW)
    return MARGIN + column * (BLOCK + GAP), HEAD + NOTE + row * ROW + 108


def _slot_at(index: int) -> tuple[float, float]:
    left, middle = _block_at(index)
    return left + BLOCK + GAP / 2, middle


def _last_at(film: Film) -> tuple[float, float]:
    """The last block closes a full row instead of beginning another."""
    count = len(film.slots)
    if count and count % PER_ROW == 0:
        left, middle = _block_at(count - 1)
        return left + BLOCK + GAP, middle
    return _block_at(count)


def _host(film: Film) -> list[Shape]:
    places = [*(_block_at(index) for index in range(len(film.slots))), _last_at(film)]
    shapes: list[Shape] = [Text(MARGIN, 24, clip(film.title, 44), 15, INK, "start", True)]
    for (left, middle), (to, below) in pairwise(places):
        if middle == below:
            points = [(left + BLOCK, middle), (to, below)]
        else:  # around to the next row
            turn, edge = middle + HALF + 22, left + BLOCK + GAP + 16
            points = [(left + BLOCK, middle), (edge, middle), (edge, turn), (to + 12, turn), (to + 12, below - HALF)]
        shapes.append(Line(tuple(points), MUTED))
    for (left, middle), name in zip(places, film.blocks, strict=True):
        shapes.append(Rect(left, middle - HALF, BLOCK, 2 * HALF, FAINT, 6))
        shapes.append(Text(left + BLOCK / 2, middle + 4, clip(name, 11), 11.5, INK, "middle"))
    for index, slot in enumerate(film.slots):
        x, y = _slot_at(index)
        if slot not in film.blocks:
            shapes.append(Text(x, y + 19, clip(slot, 11), 11.5, MUTED, "middle"))
        shapes.append(Circle(x, y, 3.5, MUTED, MUTED))
        shapes.append(Line(((x, y), (x, y - LIFT)), MUTED, 1.5))
    return shapes


def _seed(x: float, y: float, state: SlotState) -> list[Shape]:
    """The seed with its letter, its blueprint above and its alpha below the slot."""
    stage, middle = state.stage, y - LIFT
    acts = state.alpha > 0 and stage in LIVE_STAGES
    radius = SMALL + min(1.0, state.alpha) * (LARGE - SMALL) if acts else SMALL
    fill = STAGES.get(stage, PAPER)
    ink = ink_on(fill) if stage in STAGES else MUTED
    name = clip(state.blueprint or "", 13)
    return [
        Circle(x, middle, radius, fill, INK if stage in STAGES else MUTED),
        Text(x, middle + 4.2, LETTERS[stage], 12, ink, "middle", True),
        Text(x, middle - LARGE - 6, name, 12, INK, "middle"),
        Text(x, y + 35, f"α {state.alpha:.2f}" if acts else "", 11.5, MUTED, "middle"),
    ]


# -- the curves -------------------------------------------------------------------------------------------------------


def _chart_top(film: Film) -> float:
    rows = max(1, -(-len(film.slots) // PER_ROW))
    return HEAD + NOTE + rows * ROW + 22


def _range(film: Film) -> tuple[float, float]:
    values = [value for frame in film.frames for value in (frame.score, frame.control) if value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _point(film: Film, step: float, value: float) -> tuple[float, float]:
    low, high = _range(film)
    share = (step - film.first) / max(1e-9, film.last - film.first)
    x = MARGIN + LEFT + share * (WIDTH - 2 * MARGIN - LEFT - RIGHT)
    return x, _chart_top(film) + CHART * (1 - (value - low) / (high - low))


def _curves(film: Film) -> list[Shape]:
    low, high = _range(film)
    (left, top), (right, bottom) = _point(film, film.first, high), _point(film, film.last, low)
    shapes: list[Shape] = [
        Text(MARGIN, top - 9, f"{film.measure}{f' ({film.unit.strip()})' if film.unit else ''}", 11.5, MUTED),
        Line(((left, top), (right, top)), FAINT, 1),
        Line(((left, bottom), (right, bottom)), MUTED, 1),
        Text(left - 6, top + 4, f"{high:.3g}", 11.5, MUTED, "end"),
        Text(left - 6, bottom + 4, f"{low:.3g}", 11.5, MUTED, "end"),
        Text(left, bottom + 16, f"{film.first:g}", 11.5, MUTED, "middle"),
        Text((left + right) / 2, bottom + 16, "steps trained", 11.5, MUTED, "middle"),
        Text(right, bottom + 16, f"{film.last:g}", 11.5, MUTED, "middle"),
    ]
    control = [(frame.step, frame.control) for frame in film.frames]
    for series, colour, dashed in ((control, MUTED, True), ([(f.step, f.score) for f in film.frames], BLUE, False)):
        shapes += [Line(run, colour, 2.2, dashed) for run in _unbroken(film, series)]
    return shapes


def _unbroken(film: Film, series: Sequence[tuple[float, float | None]]) -> list[tuple[tuple[float, float], ...]]:
    """Stretches without a gap, of two points or more."""
    runs = [list[tuple[float, float]]()]
    for step, value in series:
        if value is None:
            runs.append([])
        else:
            runs[-1].append(_point(film, step, value))
    return [tuple(run) for run in runs if len(run) > 1]


def _now(film: Film, frame: Frame) -> list[Shape]:
    """The veil, its edge, and what the curves stand at."""
    low, high = _range(film)
    (x, top), (end, bottom) = _point(film, frame.step, high), _point(film, film.last, low)
    right = WIDTH - MARGIN - RIGHT + 12

    def shown(label: str, value: float | None) -> str:
        return "" if value is None else f"{label} {value:.3g}{film.unit}"

    return [
        Rect(x, top - 4, max(0.0, end - x) + 3, bottom - top + 3, PAPER, 0, 0.82),
        Line(((x, top - 4), (x, bottom)), MUTED, 1),
        Text(right, top + 20, shown("host" if film.has_control else "network", frame.score), 13, BLUE, "start", True),
        Text(right, top + 42, shown("control", frame.control), 13, MUTED),
    ]


# -- the legend -------------------------------------------------------------------------------------------------------


def _keys(film: Film) -> list[SeedStage]:
    return [stage for stage in film.stages if stage in STAGES]


def _legend(film: Film) -> list[Shape]:
    shapes: list[Shape] = []
    for index, stage in enumerate(_keys(film)):
        row, column = divmod(index, _KEYS_PER_ROW)
        x = MARGIN + 9 + column * (WIDTH - 2 * MARGIN) / _KEYS_PER_ROW
        y = _chart_top(film) + CHART + 40 + 22 * row
        shapes.append(Circle(x, y, 8.5, STAGES[stage], INK))
        shapes.append(Text(x, y + 4, LETTERS[stage], 10.5, ink_on(STAGES[stage]), "middle", True))
        shapes.append(Text(x + 14, y + 4, stage.name.lower(), 12, INK))
    return shapes
