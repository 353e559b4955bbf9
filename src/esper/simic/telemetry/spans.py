"""Where the time of a round goes, by name."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.profiler import record_function

from esper.leyline import BadValueError

_NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class SpanTotal:
    """All visits to one place."""

    visits: int
    wall_s: float
    """On a GPU, the time until everything was *asked for*: kernels run on unless something waits for them."""
    cpu_s: float
    """Of this thread; near `wall_s`, Python is what limits."""


class Spans:
    """Sums the time between entering and leaving named spans, nested ones under `outer/inner`.

    Switched off, a span is one shared object that does nothing and never looks at a clock. One thread only.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.marked = False
        """Whether spans also show in a trace of operators, as ranges of their names"""
        self._path: list[str] = []
        self._totals: dict[str, tuple[int, int, int]] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """`with spans("collect"): …`"""
        if not self.enabled:
            return _NOTHING
        if not name or "/" in name:
            raise BadValueError(f"a span called {name!r}; names are not empty and have no '/', which nesting adds")
        return _Span(self, name)

    def drain(self) -> dict[str, SpanTotal]:
        """The sums since the last time, in the order in which spans were first entered; open spans are not in them."""
        totals, self._totals = self._totals, {}
        return {
            path: SpanTotal(visits, wall / 1e9, cpu / 1e9) for path, (visits, wall, cpu) in totals.items() if visits
        }


class _Span(AbstractContextManager[None]):
    """One visit."""

    def __init__(self, spans: Spans, name: str) -> None:
        self._spans, self._name = spans, name

    def __enter__(self) -> None:
        self._range = _mark(self._name) if self._spans.marked else _NOTHING
        self._range.__enter__()
        self._spans._path.append(self._name)
        self._place = "/".join(self._spans._path)
        self._spans._totals.setdefault(self._place, (0, 0, 0))
        self._cpu, self._wall = time.thread_time_ns(), time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, cpu = time.perf_counter_ns() - self._wall, time.thread_time_ns() - self._cpu
        self._spans._path.pop()
        visits, old_wall, old_cpu = self._spans._totals.get(self._place, (0, 0, 0))
        self._spans._totals[self._place] = (visits + 1, old_wall + wall, old_cpu + cpu)
        self._range.__exit__(kind, error, trace)


def _mark(name: str) -> AbstractContextManager[Any]:
    """A range of this name in a trace of operators."""
    return record_function(name)
