"""Where the time goes: named spans, and a trace of every operator."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from esper.leyline import BadValueError, UnknownNameError

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


ACTIVITIES = {"cpu": (ProfilerActivity.CPU,), "cuda": (ProfilerActivity.CPU, ProfilerActivity.CUDA)}
"""Device type → what is recorded."""


@contextmanager
def operator_trace(path: Path | str, device: torch.device | str = "cpu", *, stacks: bool = False) -> Iterator[Path]:
    """Record what runs inside; on leaving, write it to `path` (.json or .json.gz: chrome://tracing, Perfetto).

    It slows everything down several times and keeps every operator in memory: for a round, not for a run. What was
    recorded up to an error is written too. An unknown device, or a path that cannot be written, is refused on entering.
    """
    activities, file = check_trace(path, device)
    # Events of one cycle or of all, there is only one; but torch 2.11 warns of every cycle that is not kept.
    profiler = profile(activities=activities, with_stack=stacks, acc_events=True)
    profiler.start()
    try:
        yield file
    finally:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        profiler.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))


def check_trace(path: Path | str, device: torch.device | str = "cpu") -> tuple[tuple[ProfilerActivity, ...], Path]:
    """What would be recorded, and where to; raises where a trace could not be taken or written."""
    return _activities(torch.device(device)), _writable(Path(path))


def _activities(device: torch.device) -> tuple[ProfilerActivity, ...]:
    if device.type not in ACTIVITIES:
        raise UnknownNameError("device type for an operator trace", device.type, ACTIVITIES)
    wanted = ACTIVITIES[device.type]
    if device.type == "cuda" and (not torch.cuda.is_available() or ProfilerActivity.CUDA not in supported_activities()):
        raise BadValueError(
            f"this build of torch ({torch.__version__}) cannot trace {device}: it has no CUDA device or no CUPTI; "
            "trace on 'cpu' instead"
        )
    return wanted


def _writable(path: Path) -> Path:
    if not path.name.endswith((".json", ".json.gz")):
        raise BadValueError(f"a trace called {path.name!r}; its name must end in .json or .json.gz")
    made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise BadValueError(f"a trace cannot be written to {path}: {error.strerror}; give another path") from error
    finally:
        for folder in made:  # nothing stays where nothing is written yet: a new run must find its folder free
            with suppress(OSError):
                folder.rmdir()
    return path
