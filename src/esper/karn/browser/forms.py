"""Controls of pages: forms whose answer is another address, so they work from the keyboard and can be shared."""

from collections.abc import Iterable, Sequence

from esper.karn.browser.asked import Asked
from esper.karn.page import Markup, element
from esper.karn.state import RunState


def chooser(asked: Asked, state: RunState, number: int, hosts: Sequence[int] = (), host: int | None = None) -> Markup:
    """Choose a round, and perhaps a host of it."""
    newest = state.complete if state.playing is None else state.playing.number
    numbers = [entry.number for entry in state.rounds] + ([newest] if newest > state.complete else [])
    before = max((each for each in numbers if each < number), default=None)
    after = min((each for each in numbers if each > number), default=None)
    fields = [_hidden("run", asked.run), _hidden("view", asked.view)]
    last = "" if not numbers else str(numbers[-1])
    box = {"type": "number", "name": "round", "min": "0", "max": last, "value": str(max(0, number))}
    fields.append(element("label", "round ", _single("input", **box)))
    if hosts:
        fields.append(element("label", "host ", select("host", map(str, hosts), str(host))))
    fields.append(element("button", "show", type="submit"))
    links = [
        element("a", words, href=asked.link(round=to, step=None), class_="button")
        for words, to in (("◂ round before", before), ("round after ▸", after))
        if to is not None
    ]
    if asked.round is not None:
        links.append(element("a", "newest", href=asked.link(round=None, step=None), class_="button"))
    return element("form", *fields, *links, action="/run", method="get", class_="chooser")


def saving(asked: Asked) -> Markup:
    """Links to the film and to the picture of the step that is shown."""
    picture = {"href": asked.film("png"), "download": "", "class": "button", "data-png": "1"}
    film = {"href": asked._replace(step=None).film("gif"), "download": "", "class": "button"}
    return element(
        "p",
        element("a", "save this step as PNG", **picture),
        element("a", "save the film as GIF", **film),
        class_="row",
    )


def query_form(asked: Asked, statement: str) -> Markup:
    """A box for one statement."""
    box = element("textarea", statement, name="sql", rows="4", spellcheck="false", **{"aria-label": "SQL"})
    button = element("button", "run", type="submit")
    fields = (_hidden("run", asked.run), _hidden("view", "sql"), box, button)
    return element("form", *fields, action="/run", method="get", class_="sql")


def select(name: str, values: Iterable[str], chosen: str) -> Markup:
    """A list to choose from."""
    options = [
        element("option", value, value=value, **({"selected": ""} if value == chosen else {})) for value in values
    ]
    return element("select", *options, name=name)


def _hidden(name: str, value: str) -> Markup:
    return _single("input", type="hidden", name=name, value=value)


def _single(tag: str, **attributes: str) -> Markup:
    """A tag without an end."""
    return Markup(element(tag, **attributes).removesuffix(f"</{tag}>"))
