"""Figures of one style, as SVG for the page or as PNG. No window, no global figure: matplotlib's objects only.

Pictures are drawn with the light value of a colour; inside the page it becomes a CSS variable, so that one drawing
serves light and dark pages.
"""

import io
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from esper.karn.palette import FAINT, INK, MUTED, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VARIABLES = {light: f"var(--{name})" for name, (light, _) in PALETTE.items()}
_STYLE: Any = {  # Any: some versions of matplotlib list every key as a type of its own
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.formatter.useoffset", "legend.frameon"), False),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,  # a name with dollar signs is a name
    **dict.fromkeys(("xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",  # text stays text: small, searchable
    "svg.hashsalt": "esper",  # the same run gives the same page
}


def _style() -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context(_STYLE)


@contextmanager
def new_figure(width: float, height: float) -> Iterator["Figure"]:
    """Yield an empty figure of this size in inches, in the common style."""
    from matplotlib.figure import Figure

    with _style():
        yield Figure(figsize=(width, height), layout="constrained")


def warm_up() -> None:
    """Draw once, to no end: the first figure takes a second, for matplotlib is imported and looks for its fonts."""
    with new_figure(2, 1) as figure:
        figure.subplots().plot([0, 1])
        to_svg(figure, "warm")


def whole_ticks(axis: "Axes") -> None:
    """Put the ticks at whole numbers, for rounds and steps."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def to_svg(figure: "Figure", name: str) -> str:
    """An `svg` element for the page: no outside address, ids that begin with `name`, colours that follow the page."""
    written = io.StringIO()
    with _style():
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = written.getvalue()
    # What stands before the element names a definition on the web; its own attributes are sizes in points.
    head, body = text[text.index("<svg") :].split(">", 1)
    (box,) = re.findall(r'viewBox="([^"]+)"', head)
    width = float(box.split()[2]) * 4 / 3
    # Ids that nothing refers to are dropped, because other drawings may have them too.
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))

    def for_page(match: re.Match[str]) -> str:
        tag = re.sub(r' id="([^"]+)"', lambda id_: f' id="{name}-{id_[1]}"' if id_[1] in used else "", match[0])
        tag = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", tag)
        return re.sub(r"(?<=: )#[0-9a-f]{6}", lambda colour: _VARIABLES.get(colour[0], colour[0]), tag)

    body = re.sub(r"<[^>]+>", for_page, body).strip()
    return f'<svg viewBox="{box}" style="width:{width:.0f}px" role="img" aria-labelledby="{name}-caption">{body}'


def to_png(figure: "Figure", pixels: int) -> bytes:
    """A picture on white, `pixels` wide."""
    written = io.BytesIO()
    with _style():
        figure.savefig(written, format="png", dpi=pixels / figure.get_figwidth(), facecolor="white")
    return written.getvalue()
