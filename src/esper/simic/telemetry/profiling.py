"""Where the time goes: named spans, and a trace of every operator."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from esper.leyline import BadValueError, UnknownNameError

_NOTHING: AbstractContextManager[Any] = nullcontext()
ACTIVITIES = {"cpu": (ProfilerActivity.CPU,), "cuda": (ProfilerActivity.CPU, ProfilerActivity.CUDA)}
"""Device type → what is recorded."""


@dataclass(frozen=True)
class SpanTotal:
    """All visits to one span."""

    visits: int
    wall_s: float
    """On a GPU, the time to *launch* the work: kernels run on unless something waits for them."""


class Spans:
    """Sums the time spent in named spans; a nested span is `outer/inner`. For one thread.

    When disabled, a span is one shared object that does nothing and never reads a clock.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.marked = False
        """Whether spans also appear as ranges in an operator trace"""
        self._path: list[str] = []
        self._totals: dict[str, tuple[int, int]] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """`with spans("collect"): …`"""
        if not self.enabled:
            return _NOTHING
        if not name or "/" in name:
            raise BadValueError(f"a span called {name!r}; use a name without '/', which separates nested spans")
        return self._measure(name)

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        with record_function(name) if self.marked else _NOTHING:
            self._path.append(name)
            path = "/".join(self._path)
            self._totals.setdefault(path, (0, 0))
            start = time.perf_counter_ns()
            try:
                yield
            finally:
                elapsed = time.perf_counter_ns() - start
                self._path.pop()
                visits, total = self._totals.get(path, (0, 0))
                self._totals[path] = (visits + 1, total + elapsed)

    def drain(self) -> dict[str, SpanTotal]:
        """The sums since the last call, in the order in which spans were first entered; without open spans."""
        totals, self._totals = self._totals, {}
        return {path: SpanTotal(visits, wall / 1e9) for path, (visits, wall) in totals.items() if visits}


@contextmanager
def operator_trace(path: Path | str, device: torch.device | str = "cpu") -> Iterator[Path]:
    """Record every operator, and write a trace to `path` (.json or .json.gz, for chrome://tracing or Perfetto).

    Slows the block down several times and holds every operator in memory, so trace a round, not a run. An error in the
    block still writes the trace. An unknown device, or a path that cannot be written, is refused on entry.
    """
    activities, file = check_trace(path, device)
    # There is one cycle only, but torch 2.11 warns of every cycle whose events are not accumulated.
    profiler = profile(activities=activities, acc_events=True)
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
    """What would be recorded, and the file. Raises if no trace can be taken on the device or written to the path."""
    kind, file = torch.device(device).type, Path(path)
    if kind not in ACTIVITIES:
        raise UnknownNameError("device type for an operator trace", kind, ACTIVITIES)
    if kind == "cuda" and (not torch.cuda.is_available() or ProfilerActivity.CUDA not in supported_activities()):
        raise BadValueError(
            f"this build of torch ({torch.__version__}) cannot trace {device}: it has no CUDA device or no CUPTI; "
            "trace on 'cpu' instead"
        )
    if not file.name.endswith((".json", ".json.gz")):
        raise BadValueError(f"a trace called {file.name!r}; its name must end in .json or .json.gz")
    created = [folder for folder in file.parents if not folder.exists()]  # the innermost first
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        raise BadValueError(f"a trace cannot be written to {file}: {error.strerror}; give another path") from error
    finally:
        for folder in created:  # a new run must find its folder free
            with suppress(OSError):
                folder.rmdir()
    return ACTIVITIES[kind], file
