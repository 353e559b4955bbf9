"""The list of runs, and several side by side."""

import json
import os
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

from esper.karn.browser.asked import Asked
from esper.karn.browser.folder import Listed
from esper.karn.canvas import new_figure, whole_ticks
from esper.karn.fields import is_number
from esper.karn.growth import GrowthRun
from esper.karn.page import Markup, element, note, picture, table
from esper.karn.palette import SERIES
from esper.karn.panels import LEARNING, gaps
from esper.karn.state import METRICS, RunState, is_of_grower, read_header
from esper.leyline import EsperError
from esper.leyline.records import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COMPARED = 8
LAST_BYTES = 1 << 17
"""Read from the end of the metrics for the list"""
FRESH_S = 60.0
"""A run that changed within so many seconds is marked"""


class Summary(NamedTuple):
    """One line of the list."""

    run: Listed
    what: str
    """Task or model; why it cannot be read"""
    done: str
    last: str


def run_list(summaries: Sequence[Summary]) -> list[Markup]:
    """All runs, with boxes to compare some."""
    if not summaries:
        text = "No run is here yet. A run is a folder with config.json, metrics.jsonl and events.jsonl, as"
        return [note(f"{text} `esper train`, `esper grow` and `esper.Grower(folder=…)` write it.")]
    rows = []
    for run, what, done, last in summaries:
        box = Markup(
            element(
                "input", type="checkbox", name="run", value=run.name, **{"aria-label": f"compare {run.name}"}
            ).removesuffix("</input>")
        )
        link = element("a", run.name, href=Asked(run.name).link())
        cells = (element("td", box), element("th", link, scope="row"))
        rows.append(element("tr", *cells, *(element("td", text) for text in (what, done, last, _ago(run.changed)))))
    titles = ("", "run", "task or model", "done", "last", "changed")
    head = element("thead", element("tr", *(element("th", title, scope="col") for title in titles)))
    grid = element("table", head, element("tbody", *rows), class_="runs")
    button = element("button", "compare the chosen runs", type="submit")
    return [element("form", element("div", grid, class_="wide"), button, action="/compare", method="get")]


def summary_of(run: Listed) -> Summary:
    """The line of a run, from its configuration and the end of its metrics."""
    try:
        header = read_header(run.path)
        config, last = header.inside("config"), _last_line(run.path / METRICS)
    except EsperError as error:
        return Summary(run, str(error), "", "")
    if is_of_grower(header):
        done = f"step {last.get('step', 0)} of {config.get('steps')}"
        score, unit = (last.get("accuracy"), " %") if is_number(last.get("accuracy")) else (last.get("loss"), " loss")
    else:
        done = f"{last['round'] + 1 if is_number(last.get('round')) else 0} of {config.get('rounds')} rounds"
        score, unit = last.get("objective"), " points"
    what = str(config.get("host") if is_of_grower(header) else config.get("task"))
    return Summary(run, what, done, f"{score:.4g}{unit}" if is_number(score) else "")


def _last_line(path: Path) -> dict[str, Json]:
    """The last complete line; empty if there is none, or if it is wrong."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().split(b"\n")
        content = json.loads(lines[-2]) if len(lines) > 1 else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _ago(changed: float) -> str:
    seconds = max(0.0, time.time() - changed)
    if seconds < FRESH_S:
        return "● just now"
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit if count > 1 else unit[:-1]} ago"
    return "● just now"


def compare_link(names: Sequence[str]) -> str:
    """The address of a comparison."""
    return f"/compare?{urlencode([('run', name) for name in names])}"


def compared(states: dict[str, RunState | GrowthRun]) -> list[Markup]:
    """Curves of several runs in one picture each, and what they came to."""
    trained = {name: state for name, state in states.items() if isinstance(state, RunState) and state.rounds}
    grown = {name: state for name, state in states.items() if isinstance(state, GrowthRun) and state.steps}
    parts = list[Markup]()
    if trained:
        pictures = []
        for panel in LEARNING:
            series = {
                name: ([entry.number for entry in state.rounds], state.series(panel.patterns[0]))
                for name, state in trained.items()
            }
            figure = _draw(series, panel.title, panel.unit, "round")
            pictures.append(picture(panel.patterns[0], figure, f"{panel.title}: means over the hosts of a round."))
        parts += [element("h2", "Controllers"), element("div", *pictures, class_="gallery two"), _table(trained)]
    if grown:
        curves = {
            name: ([step.number for step in state.steps], [step.accuracy for step in state.steps])
            for name, state in grown.items()
        }
        losses = {
            name: ([step.number for step in state.steps], [step.loss for step in state.steps])
            for name, state in grown.items()
        }
        pictures = [
            picture(title, _draw(series, title, unit, "step"), f"{title} on validation data after every step.")
            for title, series, unit in (("accuracy", curves, "%"), ("loss", losses, ""))
            if any(value is not None for _, values in series.values() for value in values)
        ]
        parts += [element("h2", "Models"), element("div", *pictures, class_="gallery two")]
    return parts or [note("None of these runs has a complete round or step yet.")]


def _table(states: dict[str, RunState]) -> Markup:
    columns = ("objective", "gain", "accuracy", "added_parameters", "committed")
    rows = [
        (
            name,
            str(state.setting("task")),
            str(state.complete),
            *(f"{state.rounds[-1].columns[each]:.2f}" for each in columns),
        )
        for name, state in states.items()
    ]
    head = ("run", "task", "round", *(each.replace("_", " ") for each in columns))
    return table(
        head,
        rows,
        "The last complete round of each run. Rounds draw their own hosts; `esper evaluate` compares on the same.",
    )


def _draw(series: dict[str, tuple[list[int], list[float | None]]], title: str, unit: str, axis_name: str) -> "Figure":
    with new_figure(5.2, 3.0) as figure:
        axis = figure.subplots()
        for (name, (numbers, values)), colour in zip(series.items(), cycle(SERIES), strict=False):
            axis.plot(numbers, gaps(values), color=colour, marker="o", markersize=2.8, label=name)
        axis.set(title=title, ylabel=unit, xlabel=axis_name)
        axis.grid(axis="y")
        whole_ticks(axis)
        axis.legend(loc="best")
    return figure
