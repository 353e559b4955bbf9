"""The views of the run of a Grower: one model, steps in place of rounds, perhaps no policy."""

from esper.karn.browser.asked import Asked
from esper.karn.browser.forms import saving
from esper.karn.browser.parts import decisions_table, fleet_grid, log_lines, seeds_table
from esper.karn.film import film_of_growth
from esper.karn.film_page import FILM_CAPTION, film_element
from esper.karn.growth import GrowthRun
from esper.karn.growth_page import contributions_section, growth_timeline, parameters_section, summary_section
from esper.karn.page import Markup, element, note

NOTHING = "No step is complete yet."


def overview(run: GrowthRun) -> list[Markup]:
    """What grew, what it contributes, and the budget."""
    if not run.steps:
        return [note(NOTHING)]
    return [
        *summary_section(run),
        *growth_timeline(run),
        element("h2", "Contributions"),
        *contributions_section(run),
        element("h2", "Parameters"),
        *parameters_section(run),
    ]


def fleet(run: GrowthRun, asked: Asked) -> list[Markup]:
    """The one host."""
    return fleet_grid(run.histories(), run.slots, asked, 0) if run.steps else [note(NOTHING)]


def host(run: GrowthRun, asked: Asked) -> list[Markup]:
    """The model: its film, its seeds and what was decided."""
    if not run.steps:
        return [note(NOTHING)]
    (history,) = run.histories()
    film = film_element(film_of_growth(run), "film", FILM_CAPTION, asked.step)
    exact = asked._replace(round=None, host=None)
    decided = [element("h2", "Decisions"), *decisions_table(history)]
    return [film, saving(exact), *seeds_table(history, run.slots), *decided]


def decisions(run: GrowthRun) -> list[Markup]:
    """What was decided at each step."""
    return decisions_table(run.histories()[0]) if run.steps else [note(NOTHING)]


def log(run: GrowthRun) -> list[Markup]:
    """What happened, and remarks."""
    remarks = [element("li", f"step {step.number}: {remark}") for step in run.steps for remark in step.remarks]
    lines = log_lines(0, run.histories(), with_host=False)
    return [*lines, element("ul", *remarks, class_="log")] if remarks else lines
