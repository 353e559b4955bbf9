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
LINES = ("blue", "muted", "orange", "purple", "olive", "sky")
"""Colours of the curves of one chart, the most important first"""
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


def chart(curves: Sequence[Values], width: int, height: int, *, form: str = "+.1f", zero: bool = False) -> list[Text]:
    """Curves over a common axis. The first is drawn in dots, the others in characters of their own."""
    columns = max(1, width - AXIS)
    low, high = limits(*curves, *([[0.0]] if zero else []))
    cells = [[0] * columns for _ in range(height)]
    others: dict[tuple[int, int], tuple[str, int]] = {}

    def level(value: float, rows: int) -> int:
        return min(rows - 1, max(0, round((high - value) / (high - low) * (rows - 1))))

    def place(index: int, count: int, across: int) -> int:
        return index * (across - 1) // max(1, count - 1) if count > 1 else 0

    longest = max((len(curve) for curve in curves), default=0)
    for order, curve in enumerate(curves):
        known = [(place(i, longest, 2 * columns), v) for i, v in enumerate(curve) if v is not None and math.isfinite(v)]
        for (x, value), (end, following) in zip(known, [*known[1:], *known[-1:]], strict=True):
            for between in range(x, max(end, x + 1)):
                share = (between - x) / (end - x) if end > x else 0.0
                y = level(value + share * (following - value), 4 * height)
                if order:
                    others.setdefault((y // 4, between // 2), ("╌·∙"[(order - 1) % 3], order))
                else:
                    cells[y // 4][between // 2] |= DOTS[y % 4][between % 2]
    baseline = level(0.0, 4 * height) // 4 if zero else -1
    return [_row(row, bits, others, high, low, height, form, row == baseline) for row, bits in enumerate(cells)]


def _row(
    row: int, bits: Sequence[int], others: dict[tuple[int, int], tuple[str, int]], high: float, low: float, height: int,
    form: str, is_zero: bool,
) -> Text:  # fmt: skip
    """One row of a chart, with its label where it is the first or the last."""
    label = f"{high:{form}}" if row == 0 else f"{low:{form}}" if row == height - 1 else "0" if is_zero else ""
    line = styled((f"{label[: AXIS - 1]:>{AXIS - 1}}", "muted"), ("┤" if label else "│", "faint"))
    for column, dots in enumerate(bits):
        if dots:
            line.append(chr(0x2800 + dots), COLOURS[LINES[0]])
        elif (row, column) in others:
            mark, order = others[row, column]
            line.append(mark, COLOURS[LINES[order % len(LINES)]])
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
