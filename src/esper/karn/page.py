"""HTML by construction: text is escaped wherever it enters, and only `Markup` is taken as it is."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from esper.karn.canvas import to_svg
from esper.karn.palette import PALETTE, STAGES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """`<tag attributes>children</tag>`; `class_` loses its last letter."""
    named = "".join(f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items())
    inside = "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    return Markup(f"<{tag}{named}>{inside}</{tag}>")


def picture(name: str, figure: "Figure", caption: str) -> Markup:
    """A drawing with a caption below it. `name` is the prefix of its ids."""
    return element("figure", Markup(to_svg(figure, name)), element("figcaption", caption, id=f"{name}-caption"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> Markup:
    """A table whose first column names the rows. Cells know their column, for screens on which rows are stacked."""
    titles = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, **{"data-head": name}) for name, cell in zip(head[1:], row[1:], strict=True)),
        )
        for row in rows
    ]
    filled = element("table", element("caption", caption), element("thead", titles), element("tbody", *body))
    return element("div", filled, class_="wide")


def note(*parts: str) -> Markup:
    """A paragraph in a muted colour."""
    return element("p", *parts, class_="note")


def facts_list(facts: Mapping[str, object]) -> Markup:
    """Names with their values; those without a value (None) are omitted."""
    entries = [
        part for name, value in facts.items() if value is not None
        for part in (element("dt", name), element("dd", str(value)))
    ]  # fmt: skip
    return element("dl", *entries)


def stage_legend() -> Markup:
    """The colours of stages in timelines."""
    swatches = [
        element("span", element("i", style=f"background:{colour}"), stage.name.lower(), class_="key")
        for stage, colour in STAGES.items()
    ]
    return element("p", *swatches, class_="legend")


def folded(title: str, part: str) -> Markup:
    """A part that is hidden until the reader opens it."""
    return element("details", element("summary", title), part)


def styles(rules: str = "") -> Markup:
    """The style of pages, in light and dark. `rules`: CSS of parts."""
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1))
    colours = (
        f":root{{color-scheme:light dark;--paper:#ffffff;--panel:#f6f8fa;{light}}}\n"
        # Paper is white, whatever the screen is.
        f"@media screen and (prefers-color-scheme:dark){{:root{{--paper:#14181d;--panel:#1d232a;{dark}}}}}\n"
    )
    return element("style", Markup(colours + _RULES + rules))


def page(title: str, *parts: str, rules: str = "") -> str:
    """The whole document: it loads nothing from anywhere. `rules`: CSS of its parts."""
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        element("title", title),
        styles(rules),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', element('main', *parts)), lang='en')}\n"


_RULES = """
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:1.5rem}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .5rem}
h2{font-size:1.25rem;margin:2.5rem 0 .75rem;padding-bottom:.25rem;border-bottom:1px solid var(--faint)}
h3{font-size:1rem;margin:1.5rem 0 .5rem}
p{max-width:75ch;margin:.5rem 0}
nav a{color:var(--blue);margin-right:1rem}
.lead{font-size:1.08rem}
.note{color:var(--muted)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:1rem 0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
figure{margin:1rem 0;break-inside:avoid}
figure svg{display:block;max-width:100%;height:auto;font-family:"DejaVu Sans",Verdana,sans-serif}
figcaption{max-width:85ch;margin-top:.35rem;color:var(--muted);font-size:.9rem}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--cell)),1fr));gap:.5rem 1.5rem}
.two{--cell:480px}.three{--cell:330px}
.gallery figure{margin:.5rem 0}
.legend{max-width:none;font-size:.9rem}
.key{display:inline-block;margin-right:1.1rem;white-space:nowrap}
.key i{display:inline-block;width:1.1em;height:.8em;margin-right:.4em;border-radius:2px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;margin:1rem 0}
caption{text-align:left;color:var(--muted);padding-bottom:.35rem}
th,td{padding:.25rem .75rem;text-align:right;border-bottom:1px solid var(--faint);vertical-align:top}
th:first-child{text-align:left;overflow-wrap:anywhere;min-width:10ch;max-width:40ch}
tbody th{font-weight:normal}
details{margin:1rem 0}summary{cursor:pointer;color:var(--blue)}
pre{background:var(--panel);padding:.75rem;overflow-x:auto;font-size:.8rem}
@media print{main{max-width:none;padding:0}nav,details{display:none}h2{break-after:avoid}}
"""
