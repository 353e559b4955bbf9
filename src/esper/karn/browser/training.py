"""The views of a training run."""

from collections.abc import Sequence
from pathlib import Path

from esper.karn import panels
from esper.karn.browser.asked import Asked
from esper.karn.browser.forms import chooser, saving
from esper.karn.browser.parts import decisions_table, fleet_grid, log_lines, seeds_table
from esper.karn.evaluations import read_evaluations
from esper.karn.film import film_of_host, film_of_playing
from esper.karn.film_page import FILM_CAPTION, film_element
from esper.karn.histories import HostHistory
from esper.karn.overview import health_of, pace_of
from esper.karn.page import Markup, element, facts_list, note, picture, stage_legend, table
from esper.karn.sections import decisions_section, health_section, life_of, policies_section, what_was_learned
from esper.karn.state import RunState
from esper.karn.timeline import draw_host, ranking
from esper.leyline import BadValueError


def played(state: RunState, asked: Asked) -> tuple[int, list[HostHistory]]:
    """The round that is asked for and its hosts: by default the one that is being played, or else the shown one."""
    playing = state.playing
    if playing is not None and asked.round in (None, playing.number):
        return playing.number, list(playing.hosts.values())
    return state.shown, state.histories()


def overview(state: RunState) -> list[Markup]:
    """How far the run is, what it has learned so far, curves and alarms."""
    if not state.rounds:
        return [note("No round is complete yet."), facts_list(progress(state))]
    parts = [element("p", " ".join(what_was_learned(state)), class_="lead"), facts_list(progress(state))]
    curves = [picture(panel.patterns[0], panels.draw_panel(state, panel), panel.meaning) for panel in panels.LEARNING]
    parts.append(element("div", *curves, class_="gallery two"))
    return [*parts, element("h2", "Health"), unhealthy(state), element("h2", "Alarms"), *alarms(state)]


def progress(state: RunState) -> dict[str, object]:
    """Rounds, speed and time left."""
    pace, planned = pace_of(state), state.setting("rounds")
    facts: dict[str, object] = {
        "task": state.setting("task"),
        "random seed": state.setting("seed"),
        "rounds": f"{len(state.rounds)} complete of {planned}",
    }
    if pace.episodes_per_hour is not None:
        facts["speed"] = f"{pace.episodes_per_hour:,.0f} episodes per hour (growing hosts)"
    if pace.seconds_left:
        facts["time left"] = _duration(pace.seconds_left)
    return facts


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def unhealthy(state: RunState) -> Markup:
    """Numbers of the last round that are out of their healthy range."""
    counted, found = health_of(state)
    if not found:
        return note(f"All {counted} numbers of the learner that have a healthy range are in it.")
    rows = [(each.name, f"{each.value:.4g}", each.healthy) for each in found]
    return table(("metric", "value", "healthy"), rows, f"Out of range in the last round, of {counted} numbers.")


def alarms(state: RunState) -> list[Markup]:
    """All alarms, the newest first."""
    if not state.alarms:
        return [note("No alarm was raised.")]
    rows = [
        (str(each.round), f"{each.alarm} {each.subject}".strip(), "ended" if each.ended else each.severity, each.cause)
        for each in reversed(state.alarms)
    ]
    return [table(("round", "alarm", "severity", "cause"), rows[:100], "Alarms, the newest first.")]


def fleet(state: RunState, asked: Asked) -> list[Markup]:
    """All hosts of a round."""
    number, hosts = played(state, asked)
    return [chooser(asked, state, number), *fleet_grid(hosts, state.slots, asked, number)]


def host(state: RunState, asked: Asked) -> list[Markup]:
    """One host: its film, what its seeds are worth, what was decided, and its timeline."""
    number, hosts = played(state, asked)
    if not hosts:
        return [chooser(asked, state, number), note("No host of this round is known yet.")]
    env = first_env(state, number, hosts) if asked.host is None else asked.host
    history = next((each for each in hosts if each.env == env), None)
    head = chooser(asked, state, number, [each.env for each in hosts], env)
    if history is None:
        return [head, note(f"There is no host {env} in round {number}.")]
    film = film_of_playing(state, env) if history.outcome is None else film_of_host(state, env)
    exact = asked._replace(round=number, host=env)
    parts = [
        head,
        film_element(film, "film", FILM_CAPTION, asked.step),
        saving(exact),
        *seeds_table(history, state.slots),
    ]
    parts += [element("h2", "Decisions"), *decisions_table(history)]
    if history.outcome is not None:
        rank = ranking(state.episodes[number]).index(history.outcome)
        timeline = picture("timeline", draw_host(state, history.outcome), life_of(state, rank, history.outcome))
        parts += [element("h2", "Timeline"), stage_legend(), timeline]
    return parts


def first_env(state: RunState, number: int, hosts: Sequence[HostHistory]) -> int:
    """The best host of a complete round, the first of one that is being played."""
    episodes = state.episodes.get(number)
    return ranking(episodes)[0].env if episodes and hosts[0].outcome is not None else hosts[0].env


def decisions(state: RunState) -> list[Markup]:
    """What the policy germinates and commits, over rounds."""
    return decisions_section(state) if state.rounds else [note("No round is complete yet.")]


def health(state: RunState) -> list[Markup]:
    """Every number of the update."""
    return health_section(state) if state.rounds else [note("No round is complete yet.")]


def log(state: RunState, asked: Asked) -> list[Markup]:
    """What happened in a round, and alarms."""
    number, hosts = played(state, asked)
    lines = log_lines(number, hosts, with_host=True)
    return [
        chooser(asked, state, number),
        element("h2", f"Round {number}"),
        *lines,
        element("h2", "Alarms"),
        *alarms(state),
    ]


def evaluations(paths: Sequence[Path]) -> list[Markup]:
    """Policies compared, with intervals. A file that is none is named."""
    found, wrong = [], []
    for path in paths:
        try:
            found += read_evaluations(path)
        except BadValueError as error:
            wrong.append(note(str(error)))
    return [*wrong, *policies_section(found)]
