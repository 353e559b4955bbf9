"""Parts of pages about hosts: the grid of a fleet, sparklines, decisions and the log. All from histories."""

from collections.abc import Mapping, Sequence

from esper.karn.browser.asked import Asked
from esper.karn.histories import Curve, HostHistory, SeedNow
from esper.karn.overview import entries_of
from esper.karn.page import Markup, element, note, table
from esper.karn.palette import LETTERS, STAGES, ink_on
from esper.leyline import Measurement, SeedStage

SPARK_WIDTH, SPARK_HEIGHT = 96.0, 24.0
MOST_LINES = 400
"""Of a log on one page"""
VERBS = {
    "birth": ("▲", "born"),
    "commit": ("★", "committed"),
    "cut": ("✖", "cut"),
    "panic": ("!", "panic: back to the snapshot"),
}
"""What happened → its mark in timelines, and a verb"""


def sparkline(values: Curve, steps: int) -> Markup:
    """A small curve with its zero dashed; as wide as the whole episode."""
    known = [value for value in values if value is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    low, high = (low, high) if high > low else (-1.0, 1.0)
    scale = (SPARK_HEIGHT - 4) / (high - low)

    def place(step: int, value: float) -> str:
        return f"{step * SPARK_WIDTH / max(1, steps):.1f},{2 + (high - value) * scale:.1f}"

    points = " ".join(place(step, value) for step, value in enumerate(values, 1) if value is not None)
    zero = f"{place(0, 0.0)} {place(steps, 0.0)}"
    return element(
        "svg",
        element("polyline", points=zero, class_="zero"),
        element("polyline", points=points, class_="curve"),
        **{"viewBox": f"0 0 {SPARK_WIDTH:g} {SPARK_HEIGHT:g}", "class": "spark", "aria-hidden": "true"},
    )


def stage_cell(slot: str, seed: SeedNow | None) -> Markup:
    """A slot as a small square: colour and letter are its stage, the bar below is alpha."""
    stage = SeedStage.DORMANT if seed is None else seed.stage
    words = f"{slot}: {stage.name.lower()}"
    if seed is not None:
        words += f", {seed.blueprint or 'unnamed'}, alpha {seed.alpha:.2f}"
    colour = STAGES.get(stage)
    style = "" if colour is None else f"background:{colour};color:{ink_on(colour)}"
    bar = element("i", style=f"width:{100 * (0 if seed is None else min(1.0, seed.alpha)):.0f}%")
    named = {"class": "slot", "style": style, "title": words, "role": "img", "aria-label": words}
    return element("span", LETTERS[stage], bar, **named)


def fleet_grid(hosts: Sequence[HostHistory], slots: Sequence[str], asked: Asked, played: int) -> list[Markup]:
    """A row per host: its slots now, its gain over steps, and what it is now."""
    rows = []
    room = f"min-width:{1.9 * min(5, max(1, len(slots))) + 1.1:g}rem!important"  # five beside each other on a phone
    by_gain = any(value is not None for host in hosts for value in host.gains)
    for host in hosts:
        seeds = host.at()
        curve = host.gains if by_gain else host.accuracies if any(host.accuracies) else host.losses
        last = next((value for value in reversed(curve) if value is not None), None)
        link = element("a", str(host.env), href=asked.link(view="host", host=host.env, round=played))
        rows.append(
            element(
                "tr",
                element("th", link, scope="row"),
                element("td", *(stage_cell(slot, seeds.get(slot)) for slot in slots), class_="slots", style=room),
                element("td", sparkline(curve, host.steps)),
                element("td", "" if last is None else f"{last:+.1f}" if by_gain else f"{last:.4g}"),
            )
        )
    what = "gain" if by_gain else "accuracy" if any(any(host.accuracies) for host in hosts) else "loss"
    head = element("tr", *(element("th", name, scope="col") for name in ("host", "slots", f"{what} by step", what)))
    unit = "in %" if what == "accuracy" else "on validation data"
    unit = "that of all acting seeds, in points of accuracy over the control" if by_gain else unit
    curves = f"The {what} is {unit}; each curve has a scale of its own, and its dashed line is zero."
    order = (
        f"Slots from left to right: {', '.join(slots) or 'none yet'}; the dark bar below a slot is its alpha, 0 to 1."
    )
    grid = element("table", element("thead", head), element("tbody", *rows), class_="fleet")
    return [key_of_stages(), note(f"{order} {curves}"), grid]


def key_of_stages() -> Markup:
    """Colours and letters of stages."""
    keys = [
        element(
            "span",
            element("b", LETTERS[stage], style=f"background:{colour};color:{ink_on(colour)}"),
            stage.name.lower(),
            class_="key",
        )
        for stage, colour in STAGES.items()
    ]
    return element("p", *keys, element("span", element("b", "·"), "empty", class_="key"), class_="legend keys")


def seeds_table(history: HostHistory, slots: Sequence[str]) -> list[Markup]:
    """The slots that are not empty, with what was measured of their seeds."""
    seeds = history.at()
    rows = [
        (
            slot,
            f"{LETTERS[seed.stage]} {seed.stage.name.lower()}",
            seed.blueprint or "unnamed",
            f"{seed.alpha:.2f}",
            str(seed.born),
            shown(seed.audition),
            shown(seed.contribution),
        )
        for slot in slots
        if (seed := seeds.get(slot)) is not None
    ]
    title = element("h2", f"Seeds after step {history.trained}, the last one trained")
    if not rows:
        return [title, note("All slots are empty.")]
    head = ("slot", "stage", "blueprint", "alpha", "born at", "audition", "contribution")
    caption = (
        "Audition: what a seed would gain if it acted; contribution: what the host would lose without it. In points of "
        "accuracy ± standard error. A contribution may exceed the gain, because the host comes to rely on its seeds."
    )
    return [title, table(head, rows, caption)]


def shown(measured: Measurement | None) -> str:
    """A measurement with its standard error."""
    return "" if measured is None else f"{measured.value:+.2f} ± {measured.error:.2f}"


def decisions_table(history: HostHistory) -> list[Markup]:
    """What was decided at each step, how likely it was, and what else was considered."""
    steps = sorted({*history.actions, *history.choices})
    if not steps:
        return [note("No decision other than WAIT yet.")]
    rows = []
    for step in steps:
        action, chance = history.actions.get(step), history.chances.get(step)
        words = "WAIT" if action is None else " ".join(filter(None, (action.op, action.slot, action.blueprint)))
        considered = "; ".join(f"{head}: {_likeliest(of)}" for head, of in history.choices.get(step, {}).items())
        rows.append((str(step), words, "" if chance is None else f"{100 * chance:.0f} %", considered))
    caption = "Steps count from 0, before their training."
    if not history.choices:
        caption += " The log has no probabilities of this host's decisions."
    return [table(("step", "decision", "probability", "considered"), rows, caption)]


def _likeliest(options: Mapping[str, float], most: int = 3) -> str:
    return ", ".join(f"{name} {100 * chance:.0f} %" for name, chance in list(options.items())[:most])


def log_lines(number: int, hosts: Sequence[HostHistory], *, with_host: bool) -> list[Markup]:
    """Births, commits, cuts and panics of a round, the newest first."""
    entries = entries_of(number, hosts)[::-1]
    if not entries:
        return [note("Nothing was born, committed or cut yet.")]
    lines = []
    for entry in entries[:MOST_LINES]:
        symbol, verb = VERBS[entry.what]
        what = f"{entry.blueprint or 'a seed'} {verb} in {entry.slot}" if entry.slot else f"{verb} ({entry.blueprint})"
        where = f", host {entry.env}" if with_host else ""
        lines.append(element("li", element("b", f"step {entry.at}"), f" {symbol} {what}{where}"))
    more = len(entries) - MOST_LINES
    return [element("ul", *lines, class_="log"), *([note(f"{more} earlier lines are not shown.")] if more > 0 else [])]
