"""Which parts a view has, for training runs and for Growers."""

from collections.abc import Callable, Mapping

from esper.karn.browser import growing, training
from esper.karn.browser.asked import LIVE_VIEWS, VIEWS, Asked
from esper.karn.browser.sql import sql_view
from esper.karn.browser.watched import Watched
from esper.karn.film import Film, film_of_growth, film_of_host, film_of_playing
from esper.karn.growth import GrowthRun
from esper.karn.overview import condition_of
from esper.karn.page import Markup, element, note
from esper.karn.state import RunState
from esper.leyline import BadValueError, EsperError

TRAINING: Mapping[str, Callable[[RunState, Asked], list[Markup]]] = {
    "overview": lambda state, _: training.overview(state),
    "fleet": training.fleet,
    "host": training.host,
    "decisions": lambda state, _: training.decisions(state),
    "health": lambda state, _: training.health(state),
    "log": training.log,
}
GROWING: Mapping[str, Callable[[GrowthRun, Asked], list[Markup]]] = {
    "overview": lambda run, _: growing.overview(run),
    "fleet": growing.fleet,
    "host": growing.host,
    "decisions": lambda run, _: growing.decisions(run),
    "log": lambda run, _: growing.log(run),
}


def draw_view(watched: Watched, asked: Asked) -> list[Markup]:
    """What an address asks for. For one thread, because matplotlib draws."""
    if asked.view == "sql":
        return sql_view(watched, asked)
    if asked.view == "evaluations":
        return training.evaluations(watched.folders.evaluations(watched.run))
    if watched.refused:
        return [element("p", watched.refused, class_="error", role="alert")]
    with watched.lock:
        try:
            content = watched.drawn(asked, version_of(watched, asked), lambda: _draw(watched, asked))
        except EsperError as error:  # the log is wrong in a way that its reader could not see
            content = [element("p", str(error), class_="error", role="alert")]
        problems = list(watched.follower.problems)
    return [*_problems(problems), *content]


def _draw(watched: Watched, asked: Asked) -> list[Markup]:
    state = watched.state
    if isinstance(state, GrowthRun):
        if asked.view not in GROWING:
            return [note("The run of a Grower has no policy that learns, so it has no such view.")]
        return GROWING[asked.view](state, asked)
    if not _show_round(watched, state, asked):
        return [note(f"Round {asked.round} is not complete, or its events have not been read yet.")]
    return TRAINING[asked.view](state, asked)


def _show_round(watched: Watched, state: RunState, asked: Asked) -> bool:
    """Have the details of the round that is asked for at hand."""
    if asked.view not in LIVE_VIEWS or (state.playing is not None and asked.round == state.playing.number):
        return True
    return watched.follower.show(asked.round)


def _problems(problems: list[str]) -> list[Markup]:
    if not problems:
        return []
    entries = [element("li", problem) for problem in problems]
    title = f"{len(problems)} lines of the log could not be read; the rest is shown."
    return [element("div", element("p", title), element("ul", *entries), class_="error", role="alert")]


def film_of_asked(watched: Watched, asked: Asked) -> Film:
    """The film of the host that is asked for."""
    with watched.lock:
        state = watched.state
        if isinstance(state, GrowthRun):
            if not state.steps:
                raise BadValueError(f"{asked.run} has no complete step yet")
            return film_of_growth(state)
        if not _show_round(watched, state, asked._replace(view="host")):
            raise BadValueError(f"round {asked.round} of {asked.run} is not complete, or has not been read yet")
        number, hosts = training.played(state, asked)
        if not hosts:
            raise BadValueError(f"{asked.run} has no host yet")
        env = training.first_env(state, number, hosts) if asked.host is None else asked.host
        is_playing = state.playing is not None and number == state.playing.number
        return film_of_playing(state, env) if is_playing else film_of_host(state, env)


def version_of(watched: Watched, asked: Asked) -> object:
    """Changes when the view does."""
    version = watched.version()
    return version if asked.view in LIVE_VIEWS else version._replace(live=0)


def heading(watched: Watched, asked: Asked) -> Markup:
    """The name of the run, and links to its views."""
    views = [view for view in VIEWS if view != "health" or isinstance(watched.state, RunState)]
    links = [element("a", "all runs", href="/")]
    for view in views:
        current = {"aria-current": "page"} if view == asked.view else {}
        links.append(element("a", VIEWS[view], href=asked.link(view=view, sql=None), **current))
    return element("div", element("h1", watched.run.name), element("nav", *links))


def status_of(watched: Watched) -> Markup:
    """How far the run is, in a line that is always fresh."""
    state, follower = watched.state, watched.follower
    if follower.gone:
        return Markup(element("b", "This run was deleted; shown is what was read before."))
    read, size = follower.behind
    parts = [condition_of(follower)]
    if isinstance(state, GrowthRun):
        parts.append(f"step {state.complete} of {state.config['steps']}")
    else:
        parts.append(f"{len(state.rounds)} of {state.setting('rounds')} rounds")
        if (playing := state.playing) is not None:
            parts.append(f"round {playing.number} is being played: step {playing.trained} of {playing.steps}")
    shown = " · ".join(parts)
    if read >= size:
        return Markup(element("span", shown))
    bar = element("progress", value=str(read), max=str(size), **{"aria-label": "reading the log"})
    return Markup(element("span", f"{shown} · reading the log: {read >> 20:,} of {size >> 20:,} MB ") + bar)
