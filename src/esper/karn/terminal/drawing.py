"""Drawing with characters: rich texts of a given width. Every text from a log passes through `safe`."""

import math
from collections.abc import Sequence

from rich.cells import set_cell_size
from rich.style import Style
from rich.text import Text

from esper.karn.palette import LETTERS, PALETTE, STAGES, ink_on
from esper.leyline import Measurement, SeedStage
from esper.leyline.records import printable

Values = Sequence[float | None]
BARS = " ▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"
COLOURS = {name: dark for name, (_, dark) in PALETTE.items()}
STYLES = {name: Style.parse(colour) for name, colour in COLOURS.items()}
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column"""
AXIS = 8
"""Columns in front of a chart"""
STAGE_STYLES = {stage: Style.parse(f"{ink_on(colour)} on {colour}") for stage, colour in STAGES.items()} | {
    SeedStage.DORMANT: Style.parse(COLOURS["muted"])
}


def safe(text: object) -> str:
    """Text in one line, with control characters escaped: no log can command the terminal."""
    return printable(str(text)).replace("\n", "\\n")


def fitted(text: str, width: int) -> str:
    """A text in exactly this many columns, cut with an ellipsis."""
    plain = safe(text)
    cut = set_cell_size(plain, width)
    return cut if cut.rstrip() == plain.rstrip() or width < 2 else set_cell_size(plain, width - 1).rstrip() + "…"


def styled(*parts: str | tuple[str, str]) -> Text:
    """A text of parts, some with the name of a colour or a style."""
    return Text.assemble(
        *((part, COLOURS.get(style, style)) for part, style in map(_pair, parts)), no_wrap=True, end=""
    )


def _pair(part: str | tuple[str, str]) -> tuple[str, str]:
    return part if isinstance(part, tuple) else (part, "")


def heading(title: str, remark: str = "") -> Text:
    """A title of a part of a screen."""
    return styled((title, "bold"), (f"  {remark}" if remark else "", "muted"))


def number(value: float | None, form: str = "+.2f") -> str:
    """A number, or a dash."""
    return "–" if value is None else f"{value:{form}}"


def measured(value: Measurement | None) -> str:
    """A measurement with its error, or a dash."""
    return "–" if value is None else f"{value.value:+.2f} ± {value.error:.2f}"


def duration(seconds: float | None) -> str:
    """As people say it."""
    if seconds is None:
        return "–"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{hours} h" if hours < 72 else f"{round(seconds / 86400)} days"


def limits(*curves: Values) -> tuple[float, float]:
    """The least and the greatest number of some curves; a range that is not empty."""
    known = [value for curve in curves for value in curve if value is not None and math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def compressed(values: Values, width: int) -> list[float | None]:
    """At most `width` values: means of neighbours, the last ones complete."""
    if len(values) <= width or width < 1:
        return list(values)
    found: list[float | None] = []
    for column in range(width):
        part = [v for v in values[column * len(values) // width : (column + 1) * len(values) // width] if v is not None]
        found.append(sum(part) / len(part) if part else None)
    return found


def sparkline(values: Values, width: int, span: tuple[float, float] | None = None) -> str:
    """A curve in one line of text; a gap is a blank."""
    shown = compressed(values, width)
    low, high = span or limits(shown)
    scale = (len(BARS) - 2) / (high - low) if high > low else 0.0
    marks = (
        " "
        if value is None or not math.isfinite(value)
        else BARS[1 + round(min(max(value - low, 0), high - low) * scale)]
        for value in shown
    )
    return "".join(marks).ljust(width)


def chart(
    curve: Values, width: int, height: int, *, dashed: Values = (), form: str = "+.1f", zero: bool = False
) -> list[Text]:
    """A curve in dots, and perhaps a dashed one over the same axes."""
    columns, rows = max(1, width - AXIS), range(height)
    low, high = limits(curve, dashed, *([[0.0]] if zero else []))
    size = max(len(curve), len(dashed)), 2 * columns, 4 * height
    solid, other = (_dots(values, *size, (low, high)) for values in (curve, dashed))
    baseline = _level(0.0, (low, high), 4 * height) // 4 if zero else -1
    labels = {baseline: "0", rows[-1]: f"{low:{form}}", 0: f"{high:{form}}"}
    return [_row(labels.get(row, ""), solid[row], other[row], row == baseline) for row in rows]


def _level(value: float, span: tuple[float, float], down: int) -> int:
    low, high = span
    return min(down - 1, max(0, round((high - value) / (high - low) * (down - 1))))


def _dots(values: Values, count: int, across: int, down: int, span: tuple[float, float]) -> list[list[int]]:
    """Braille bits of a curve by row and column of characters. `across` dots have room for `count` values."""
    cells = [[0] * (across // 2) for _ in range(down // 4)]
    places = (index * (across - 1) // max(1, count - 1) for index in range(len(values)))
    known = [(x, v) for x, v in zip(places, values, strict=True) if v is not None and math.isfinite(v)]
    for (x, value), (end, following) in zip(known, [*known[1:], *known[-1:]], strict=True):
        for between in range(x, max(end, x + 1)):
            share = (between - x) / (end - x) if end > x else 0.0
            y = _level(value + share * (following - value), span, down)
            cells[y // 4][between // 2] |= DOTS[y % 4][between % 2]
    return cells


def _row(label: str, solid: Sequence[int], dashed: Sequence[int], is_zero: bool) -> Text:
    """One row of a chart. Of the dashed curve, every other character is drawn."""
    line = styled((f"{label[: AXIS - 1]:>{AXIS - 1}}", "muted"), ("┤" if label else "│", "faint"))
    for column, (dots, others) in enumerate(zip(solid, dashed, strict=True)):
        if both := dots | (0 if column % 2 else others):
            line.append(chr(0x2800 + both), COLOURS["blue" if dots else "muted"])
        else:
            line.append("┄" if is_zero else " ", COLOURS["faint"])
    return line


def stage_cell(stage: SeedStage, width: int = 1) -> tuple[str, Style]:
    """A stage as a letter on its colour."""
    return LETTERS[stage].center(width), STAGE_STYLES[stage]


def legend(width: int) -> list[Text]:
    """The letters and colours of stages, in as many lines as they need."""
    lines = [Text(no_wrap=True, end="")]
    for stage in (SeedStage.DORMANT, *STAGES):
        name = f" {'empty' if stage is SeedStage.DORMANT else stage.name.lower()}  "
        if lines[-1].cell_len + len(name) > width:
            lines.append(Text(no_wrap=True, end=""))
        lines[-1].append(*stage_cell(stage))
        lines[-1].append(name)
    return lines


def bar(share: float, width: int) -> str:
    """A bar of a share of 1."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).strip().ljust(width)
