"""What a run was taught before its first round: a section of the page."""

from pathlib import Path
from typing import NamedTuple

from esper.karn.fields import read_object
from esper.karn.page import Markup, element, table

REPORT = Path("teaching") / "report.json"  # in the folder of a run


class Choice(NamedTuple):
    """A setting of the imitation, and the objective expected of it on hosts that were held out."""

    beta: float
    pooling: float
    sharpness: float
    objective: float


class Taught(NamedTuple):
    """The report of teaching."""

    episodes: int
    hosts: int
    choices: list[Choice]  # the best first
    accuracy: dict[str, float]  # by head, and `joint`


def read_taught(run_path: Path) -> Taught | None:
    """What a run was taught; None if it was not."""
    path = run_path / REPORT
    if not path.is_file():
        return None
    report = read_object(path, "report of teaching")
    choices = [Choice(*(one.number(name) for name in Choice._fields)) for one in report.objects("choices")]
    accuracy = report.inside("accuracy")
    by_head = {name: accuracy.number(name) for name in accuracy}
    return Taught(report.whole("episodes"), report.whole("hosts"), choices, by_head)


def taught_section(taught: Taught) -> list[Markup]:
    """How much was searched, how well the policy imitates it, and which setting was chosen."""
    heads = ", ".join(f"{name} {100 * share:.0f} %" for name, share in taught.accuracy.items())
    text = (
        f"A search played {taught.episodes} episodes of fixed plans on {taught.hosts} hosts, and the policy learned to"
        f" imitate the best plans of each host. Its likeliest choice agrees with them: {heads}."
    )
    rows = [(*(f"{value:g}" for value in one[:-1]), f"{one.objective:+.2f}") for one in taught.choices]
    caption = "Settings of the imitation, the chosen one first: points expected on hosts that were held out."
    return [element("p", text), table(("β", "pooling", "sharpness", "objective"), rows, caption)]
