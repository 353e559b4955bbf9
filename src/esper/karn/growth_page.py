"""The page of a Grower's run: its curve, its slots, what the seeds contributed, and the budget."""

import json
from collections import Counter
from itertools import cycle
from typing import TYPE_CHECKING

from esper.karn.canvas import new_figure, whole_ticks
from esper.karn.film import film_of_growth
from esper.karn.film_page import FILM_CAPTION, FILM_RULES, film_element, film_scripts
from esper.karn.growth import GrowthRun
from esper.karn.page import Markup, element, facts_list, folded, note, page, picture, stage_legend, table
from esper.karn.palette import BLUE, MUTED, SERIES, VERMILION
from esper.karn.panels import gaps
from esper.karn.timeline import MARKS, draw_lanes, marks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECTIONS = {
    "summary": "What grew",
    "growth": "Growth over steps",
    "contributions": "Contributions",
    "parameters": "Parameters",
}


def growth_page(run: GrowthRun) -> str:
    """The whole document."""
    contents = (summary_section(run), _growth(run), contributions_section(run), parameters_section(run))
    sections = [
        element("section", element("h2", heading), *parts, id=name)
        for (name, heading), parts in zip(SECTIONS.items(), contents, strict=True)
    ]
    title = f"Esper: {run.config['host']} in its own loop"
    links = [element("a", heading, href=f"#{name}") for name, heading in SECTIONS.items()]
    return page(
        title,
        element("header", element("h1", title), element("nav", *links)),
        *sections,
        film_scripts(),
        rules=FILM_RULES,
    )


def summary_section(run: GrowthRun) -> list[Markup]:
    """What grew in words, and the settings."""
    last = run.steps[-1].number
    facts = {
        "run": str(run.path),
        "model": run.config["host"],
        "steps": f"{last} of {run.config['steps']}",
        "log begins after step": run.begins_after or None,
        "policy": run.config.get("policy"),
        "slots": ", ".join(run.slots),
        "seed of random numbers": run.config.get("rng_seed"),
        "git": run.git or "not recorded",
        "torch": run.torch,
    }
    return [
        element("p", " ".join(what_grew(run)), class_="lead"),
        facts_list(facts),
        folded("The whole configuration", element("pre", json.dumps(run.config, indent=1, ensure_ascii=False))),
    ]


def what_grew(run: GrowthRun) -> list[str]:
    """A paragraph of sentences."""
    own, last = run.config.whole("host_parameters"), run.steps[-1]
    counts = Counter(MARKS[mark.target][0] for mark in marks_of(run.changes))
    told = ", ".join(f"{counts[noun] or 'no'} {noun}{'' if counts[noun] == 1 else 's'}" for noun in _nouns())
    sentences = [
        f"The model had {own:,} parameters; after step {last.number} its seeds have {last.grown:,} of a budget of"
        f" {run.config.whole('budget'):,}: {told}."
    ]
    name, unit, values = _curve(run)
    known = [value for value in values if value is not None]
    if known:
        sentences.append(f"The validation {name} went from {known[0]:.4g}{unit} to {known[-1]:.4g}{unit}.")
    if run.finish is not None:
        kept, dropped = (", ".join(slots) or "none" for slots in run.finish)
        sentences.append(f"Growth is finished: seeds stayed behind {kept}; dropped behind {dropped}.")
    return sentences


def _nouns() -> list[str]:
    return [noun for noun, _ in MARKS.values()]


def _growth(run: GrowthRun) -> list[Markup]:
    remarks = [element("li", f"Step {step.number}: {remark}.") for step in run.steps for remark in step.remarks]
    rows = [
        (str(step.number), _shown(step.accuracy, ".2f"), _shown(step.loss, ".4g"), f"{step.grown:,}")
        for step in run.steps
    ]
    head = ("step", "accuracy (%)", "loss", "grown parameters")
    numbers = table(head, rows, "Validation results, and parameters of all seeds after the step.")
    listed = [element("ul", *remarks)] if remarks else []
    film = film_element(film_of_growth(run), "growth-film", FILM_CAPTION)
    return [*growth_timeline(run), *listed, film, folded("All steps", numbers)]


def growth_timeline(run: GrowthRun) -> list[Markup]:
    """The curve, and a lane per slot."""
    caption = (
        f"Above: the validation {_curve(run)[0]} after every step. Below: the stage of each slot. ▲ a seed is"
        " germinated, ★ committed, ✖ pruned. A dashed line is a panic: the model had diverged and went back to its last"
        " step."
    )
    return [stage_legend(), picture("growth", _draw_growth(run), caption)]


def contributions_section(run: GrowthRun) -> list[Markup]:
    """What silencing each seed would cost."""
    if not any(step.contributions for step in run.steps):
        return [note("No contribution was measured: no seed acted, or the steps got numbers instead of data.")]
    what = "percent of the loss" if run.config.get("own_loss") else "points of accuracy"
    caption = (
        f"What silencing each seed would cost, in {what}, with its standard error. Committed seeds are not judged."
    )
    return [picture("contributions", _draw_contributions(run, what), caption)]


def parameters_section(run: GrowthRun) -> list[Markup]:
    """Parameters over steps."""
    caption = "Parameters of all seeds after every step. The dotted line is the budget."
    return [picture("parameters", _draw_parameters(run), caption)]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


# -- drawing ----------------------------------------------------------------------------------------------------------


def _curve(run: GrowthRun) -> tuple[str, str, list[float | None]]:
    """Name, unit and values of the curve: the accuracy where there is one, else the loss."""
    accuracies = [step.accuracy for step in run.steps]
    if any(value is not None for value in accuracies):
        return "accuracy", " %", accuracies
    return "loss", "", [step.loss for step in run.steps]


def _numbers(run: GrowthRun) -> list[int]:
    return [step.number for step in run.steps]


def _finish_axis(axis: "Axes", run: GrowthRun) -> None:
    axis.set(xlabel="step", xlim=(run.begins_after, max(run.steps[-1].number, run.begins_after + 1)))
    whole_ticks(axis)


def _draw_growth(run: GrowthRun) -> "Figure":
    slots = run.slots or ["no slots"]
    lanes = 0.46 * len(slots)
    name, unit, values = _curve(run)
    with new_figure(10.0, lanes + 2.6) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.0, lanes))
        above.plot(_numbers(run), gaps(values), color=BLUE, marker="o", markersize=3)
        above.set(ylabel=f"{name} ({unit.strip()})" if unit else name)
        above.grid(axis="y")
        above.tick_params(labelbottom=False)
        draw_lanes(below, slots, run.changes, run.steps[-1].number, {})
        for panic in run.panics:
            for axis in (above, below):
                axis.axvline(panic.step + 1, color=VERMILION, linestyle=(0, (2, 2)), linewidth=1.4)
        _finish_axis(below, run)
    return figure


def _draw_contributions(run: GrowthRun, unit: str) -> "Figure":
    slots = [slot for slot in run.slots if any(slot in step.contributions for step in run.steps)]
    with new_figure(10.0, 2.8) as figure:
        axis = figure.subplots()
        for slot, colour in zip(slots, cycle(SERIES), strict=False):
            measured = [step.contributions.get(slot) for step in run.steps]
            values = gaps([None if each is None else each.value for each in measured])
            errors = [0.0 if each is None else each.error for each in measured]
            axis.errorbar(_numbers(run), values, errors, color=colour, marker="o", markersize=3, capsize=2, label=slot)
        axis.axhline(0.0, color=MUTED, linewidth=0.9, linestyle=":")
        axis.set(ylabel=unit)
        axis.grid(axis="y")
        axis.legend(loc="upper left", bbox_to_anchor=(1.005, 1), borderaxespad=0)
        _finish_axis(axis, run)
    return figure


def _draw_parameters(run: GrowthRun) -> "Figure":
    with new_figure(10.0, 2.2) as figure:
        axis = figure.subplots()
        axis.step(_numbers(run), [step.grown for step in run.steps], where="post", color=BLUE, marker="o", markersize=3)
        axis.axhline(run.config.whole("budget"), color=MUTED, linewidth=1.2, linestyle=":")
        axis.set(ylabel="parameters")
        axis.set_ylim(0, 1.08 * max(run.config.whole("budget"), *(step.grown for step in run.steps), 1))
        axis.grid(axis="y")
        _finish_axis(axis, run)
    return figure
