"""The box for SQL: one reading statement, with a limit of time and of rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from threading import BoundedSemaphore

from esper.karn.browser.asked import Asked
from esper.karn.browser.forms import query_form
from esper.karn.browser.watched import Watched
from esper.karn.growth import GrowthRun
from esper.karn.page import Markup, element, folded, note, table
from esper.karn.queries import Cell, as_json, ask, columns_of, views_of
from esper.leyline import BadValueError, EsperError
from esper.leyline.records import printable

ROWS = 500
TIMEOUT_S = 20.0
LONGEST_CELL = 400
LARGEST_LOG = 256 << 20
"""Bytes of a log that is loaded for a statement here; `esper query` has no such limit"""
EXAMPLES = {
    GrowthRun: "select step, accuracy, loss, grown from steps order by step desc",
    None: "select round, objective, gain, accuracy, panics from rounds order by round desc",
}
_one = BoundedSemaphore(1)


def sql_view(watched: Watched, asked: Asked) -> list[Markup]:
    """The box, the answer, and the views with their columns."""
    example = EXAMPLES[GrowthRun if isinstance(watched.state, GrowthRun) else None]
    statement = asked.sql or example
    parts = [query_form(asked, statement), *(_answer(watched, statement) if asked.sql else [])]
    try:
        columns, views = columns_of(watched.run.path), views_of(watched.run.path)
    except EsperError as error:
        return [*parts, note(str(error))]
    rows = [
        (name, views[name].meaning, ", ".join(column.name for column in of if column.meaning))
        for name, of in columns.items()
    ]
    head = ("view", "what it has", "columns")
    return [*parts, folded("Views and their columns", table(head, rows, "What a statement can name."))]


def _answer(watched: Watched, statement: str) -> list[Markup]:
    try:
        _check_size(watched)
        with _alone(), ask(watched.run.path, statement, TIMEOUT_S) as answer:
            rows = [tuple(map(_cell, row)) for row in islice(answer.rows, ROWS + 1)]
            columns = list(map(printable, answer.columns))
    except EsperError as error:
        return [element("p", str(error), class_="error", role="alert")]
    count = f"the first {ROWS}" if len(rows) > ROWS else "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    return [table(columns, rows[:ROWS], f"{count}; a run is only read.")]


def _check_size(watched: Watched) -> None:
    _, size = watched.follower.behind
    if size > LARGEST_LOG:
        most = LARGEST_LOG >> 20
        raise BadValueError(f"the log has {size >> 20:,} MB, statements here load at most {most:,}; use `esper query`")


@contextmanager
def _alone() -> Iterator[None]:
    if not _one.acquire(timeout=TIMEOUT_S):
        raise BadValueError("another statement is still running; try again")
    try:
        yield
    finally:
        _one.release()


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    text = (
        f"{value:.6g}"
        if isinstance(value, float)
        else printable(as_json(value) if isinstance(value, list | dict) else str(value))
    )
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}…"
