"""The processes that worked on a run: when each began, from which round, and why it ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from esper.leyline.machine import Machine
from esper.leyline.records import encode
from esper.nissa import Event, Hub, JsonLines, RunBegun, RunEnded, RunResumed, as_line, end_of_lines
from esper.simic.training.run_config import git_hash
from esper.simic.training.runs import SESSIONS


@contextmanager
def session(
    folder: Path, hub: Hub, rounds: int, done: Callable[[], int], remarks: tuple[str, ...] | None
) -> Iterator[None]:
    """Tell the run's `sessions.jsonl` and the sinks of the block's begin and end. `done` counts complete rounds;
    `remarks` are those of a run that was resumed, None of a new one."""
    place = (_now(), done(), rounds, encode(Machine.here()), git_hash())
    _tell(folder, hub, RunBegun(*place) if remarks is None else RunResumed(*place, list(remarks)))
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
