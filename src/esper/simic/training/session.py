"""The processes that worked on a run: when each began, from which round, and why it ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from esper.nissa import Event, Hub, JsonLines, RunBegun, RunEnded, RunResumed, as_line, end_of_lines

SESSIONS = "sessions.jsonl"
"""Append-only, never cut: how often a run was stopped and resumed is no part of what it computes."""


@contextmanager
def session(folder: Path, hub: Hub, rounds: int, done: Callable[[], int], resumed: bool) -> Iterator[None]:
    """Tell the run's `sessions.jsonl` and the sinks of the block's begin and end. `done` counts complete rounds."""
    begin = RunResumed if resumed else RunBegun
    _tell(folder, hub, begin(_now(), done(), rounds))
    try:
        yield
    except BaseException as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk is often what the error is about; it must not hide behind this one
            _tell(folder, hub, RunEnded(_now(), done(), why, hub.dropped))
        raise
    _tell(folder, hub, RunEnded(_now(), done(), "complete", hub.dropped))


def _tell(folder: Path, hub: Hub, event: Event) -> None:
    path = folder / SESSIONS
    with JsonLines(path, end_of_lines(path)) as log:
        log.write(**as_line(event))
    hub.publish(event)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
