"""Figures of one style, as SVG for the page or as PNG. No window, no global figure: matplotlib's objects only."""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.karn import colours
from esper.karn.page import Markup
from esper.leyline import BadValueError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VARIABLES = {colour.light: f"var(--{colour.name})" for colour in colours.ALL}


@contextmanager
def style() -> Iterator[None]:
    """Everything that is drawn or saved inside looks alike."""
    import matplotlib

    ink, muted, faint = colours.INK.light, colours.MUTED.light, colours.FAINT.light
    settings: Any = {  # Any: some versions of matplotlib list every key as a type of its own
        "font.size": 9,
        "font.family": "sans-serif",
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlecolor": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": muted,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "grid.color": faint,
        "grid.linewidth": 0.7,
        "text.color": ink,
        "text.parse_math": False,  # a name with dollar signs is a name
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.6,
        "axes.formatter.useoffset": False,
        "svg.fonttype": "none",  # text stays text: small, searchable
        "svg.hashsalt": "esper",  # the same run gives the same page
    }
    with matplotlib.rc_context(settings):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def whole_ticks(axis: "Axes") -> None:
    """Rounds and steps are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def log_scale(axis: "Axes") -> None:
    """A logarithmic vertical axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def legend_above(axis: "Axes", inches: float) -> None:
    """Between title and axes, where no line can pass under it; as many columns as fit into `inches`."""
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) > 1:
        letters = max(len(label) for label in labels) + 5  # the sign takes the room of five
        columns = max(1, min(len(labels), int(15 * inches) // letters))
        rows = -(-len(labels) // columns)
        axis.set_title(axis.get_title(loc="left"), pad=6 + 12 * rows)
        axis.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2,
            handlelength=1.4, columnspacing=1.0, handletextpad=0.5, borderpad=0.2,
        )  # fmt: skip


def to_svg(figure: "Figure", name: str) -> Markup:
    """An `svg` element for the page: no outside address, ids that begin with `name`, colours that follow the page."""
    written = io.StringIO()
    with style():
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = written.getvalue()
    # What stands before the element names a definition on the web; its own attributes are sizes in points.
    head, body = text[text.index("<svg") :].split(">", 1)
    box = re.search(r'viewBox="([^"]+)"', head)
    assert box is not None
    width = float(box[1].split()[2]) * 4 / 3
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    tags = re.sub(r"<[^>]+>", lambda tag: _for_page(tag[0], name, used), body)
    return Markup(
        f'<svg viewBox="{box[1]}" style="width:{width:.0f}px" role="img" aria-labelledby="{name}-caption">'
        + tags.strip()
    )


def _for_page(tag: str, name: str, used: set[str]) -> str:
    """One tag of a drawing; ids that nothing refers to are dropped, as other drawings may have them too."""
    tag = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", tag)
    tag = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", tag)
    return re.sub(
        r"(fill|stroke): (#[0-9a-f]{6})", lambda found: f"{found[1]}: {_VARIABLES.get(found[2], found[2])}", tag
    )


def to_png(figure: "Figure", pixels: int) -> bytes:
    """A picture on white, `pixels` wide."""
    written = io.BytesIO()
    with style():
        figure.savefig(written, format="png", dpi=pixels / figure.get_figwidth(), facecolor="white")
    return written.getvalue()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is never seen half written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise BadValueError(f"{path} cannot be written: {error}") from error
