"""Warnings while rank 0 waits. A process that hangs or is stopped breaks no connection, so the run would just be
silent."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

FIRST_S = 60.0  # until the first warning; each further one comes after twice the time


@contextmanager
def warned_of(whom: str) -> Iterator[None]:
    """Print a warning, and now and then another one, as long as the block waits."""
    ended = Event()

    def warn() -> None:
        waited, until = 0.0, FIRST_S
        while not ended.wait(until - waited):
            print(
                f"warning: rank 0 has waited {until:g} s for {whom}; if that is not at work, kill it (kill -9): its "
                "connections break, and torchrun can start the ranks again",
                file=sys.stderr,
                flush=True,
            )
            waited, until = until, 2 * until

    Thread(target=warn, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
