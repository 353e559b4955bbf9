"""What an address asks for. Everything that a page shows is in its address, so that it can be shared."""

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlencode

from esper.leyline import BadValueError

VIEWS = {
    "overview": "Overview",
    "fleet": "Fleet",
    "host": "Host",
    "decisions": "Decisions",
    "health": "Health",
    "log": "Log",
    "evaluations": "Evaluations",
    "sql": "SQL",
}
LIVE_VIEWS = ("fleet", "host", "log")
"""Those that change with every step; the others change with every round"""


class Asked(NamedTuple):
    """A view of a run."""

    run: str
    view: str = "overview"
    round: int | None = None
    """None for the newest: the one that is being played, or the last complete one"""
    host: int | None = None
    step: int | None = None
    sql: str = ""

    def link(self, **changes: str | int | None) -> str:
        """The address of this view with some changes."""
        wanted = {**self._asdict(), **changes}
        return f"/run?{urlencode({name: value for name, value in wanted.items() if value not in (None, '')})}"

    def film(self, suffix: str) -> str:
        """The address of a film or picture."""
        wanted = {"run": self.run, "round": self.round, "host": self.host, "step": self.step, "as": suffix}
        return f"/film?{urlencode({name: value for name, value in wanted.items() if value is not None})}"


def asked_of(query: Mapping[str, str]) -> Asked:
    """The view that an address asks for. Raises where it is none."""
    view = query.get("view", "overview")
    if view not in VIEWS:
        raise BadValueError(f"there is no view {view!r}; the views are {', '.join(VIEWS)}")
    number, host, step = (_whole(query, name) for name in ("round", "host", "step"))
    return Asked(query.get("run", "."), view, number, host, step, query.get("sql", ""))


def _whole(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadValueError(f"{name} is {text[:40]!r}; it should be a number, from 0")
    return int(text)
