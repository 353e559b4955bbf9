"""Passes events from the training loop to sinks without ever making it wait.

            ┌──► bounded queue ──► thread ──► console
    publish ┼──► bounded queue ──► thread ──► TensorBoard
            └──► bounded queue ──► thread ──► W&B

A sink that is slow, fails or hangs does not affect the others. The log of a run does not pass through the hub.
"""

import atexit
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Protocol

from esper.nissa.events import Event

CAPACITY = 1024
"""Events that may wait for a sink. A round publishes one and its alarms, so a sink may be hundreds of rounds behind."""
PATIENCE_S = 20.0
"""How long closing waits for all sinks together. W&B alone needs 0.1 s."""


class Sink(Protocol):
    """Shows events. All calls come from the sink's own thread; any exception switches the sink off."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def open(self) -> None:
        """Create files or connect; called first."""

    def write(self, event: Event) -> None:
        """Show an event, or ignore it; more kinds may be added."""

    def close(self) -> None:
        """Flush and close; called last."""


class _Worker:
    """A sink with its queue and its thread. The thread alone writes `_shown`, the training loop the other counts."""

    def __init__(self, sink: Sink, capacity: int, failures: list[str]) -> None:
        self.sink, self.capacity, self.failures = sink, capacity, failures
        self.dropped = self._sent = self._shown = 0
        self.failed = self._given_up = False
        # `put` takes no lock that the thread could hold or that Ctrl-C could leave behind.
        self.queue: SimpleQueue[Event | None] = SimpleQueue()
        # A daemon, so that a sink that hangs cannot keep the process alive; hence the closing at exit.
        self.thread = Thread(target=self._work, name=f"esper-hub-{sink.name}", daemon=True)
        self.thread.start()

    def send(self, event: Event, closed: bool) -> None:
        """Queue an event or count it as dropped; ignore it if the sink has failed."""
        if self.failed:
            return
        if closed or self.queue.qsize() >= self.capacity:
            self.dropped += 1
        else:
            self._sent += 1
            self.queue.put(event)

    def join(self, deadline: float) -> bool:
        """Wait for the sink to end or fail, until the deadline. If it does neither, count what it has not shown as
        dropped; should it continue later, it is only closed."""
        self.thread.join(max(0.0, deadline - monotonic()))
        if self.failed or not self.thread.is_alive():
            return True
        self._given_up = True
        self.dropped += self._sent - self._shown
        return False

    def _work(self) -> None:
        if not self._try(self.sink.open):
            return
        while (event := self.queue.get()) is not None and not self._given_up:
            if not self._try(partial(self.sink.write, event)):
                with suppress(BaseException):
                    self.sink.close()
                return
            self._shown += 1
        self._try(self.sink.close)

    def _try(self, call: Callable[[], None]) -> bool:
        """Whether a call succeeds; a failure switches the sink off."""
        try:
            call()
        except BaseException as error:  # also SystemExit, which would end the thread silently
            if not self._given_up:  # otherwise it has been reported
                self.failed = True
                self.failures.append(f"{self.sink.name} ({type(error).__name__}: {error})")
            return False
        return True


class Hub(AbstractContextManager["Hub"]):
    """Passes events to sinks. Leaving the context, or the interpreter, waits for queued events.

    Call `publish` and `close` from one thread, that of the training loop. A hub without sinks has no threads.
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, capacity: int = CAPACITY, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self.failures: list[str] = []
        """Sinks that were switched off, and why"""
        self._warned = 0
        self._closed = False
        self._workers = [_Worker(sink, capacity, self.failures) for sink in sinks]
        if self._workers:
            atexit.register(self.close)

    @property
    def dropped(self) -> int:
        """Events that sinks missed because they were too slow; one that two sinks missed counts twice."""
        return sum(worker.dropped for worker in self._workers)

    def publish(self, event: Event) -> None:
        """Queue an event for every sink and return at once; a sink with a full queue misses it."""
        for worker in self._workers:
            worker.send(event, self._closed)
        self._warn()

    def metrics(self) -> dict[str, int]:
        """Counts for the line of a round; empty without sinks."""
        return {"dropped": self.dropped, "failed": len(self.failures)} if self._workers else {}

    def losses(self) -> str:
        """Which sink missed what, in words; empty if none did."""
        slow = [
            f"{worker.sink.name} was too slow for {worker.dropped} {'event' if worker.dropped == 1 else 'events'}"
            for worker in self._workers
            if worker.dropped
        ]
        return "; ".join([*slow, *(f"switched off: {failure}" for failure in self.failures)])

    def close(self) -> None:
        """Let the sinks show what is queued, then close them. Gives up on sinks that hang."""
        if self._closed or not self._workers:
            return
        for worker in self._workers:
            worker.queue.put(None)
        self._closed = True  # after the puts: if Ctrl-C comes between them, closing at exit does the rest
        deadline = monotonic() + self.patience_s
        for worker in self._workers:
            if not worker.join(deadline):
                self.failures.append(f"{worker.sink.name} did not end within {self.patience_s:g} s")
        atexit.unregister(self.close)
        self._warn()

    def _warn(self) -> None:
        """Warn of each failure once, from the training loop, where filters for warnings apply."""
        while self._warned < len(self.failures):
            failure = self.failures[self._warned]
            self._warned += 1
            warnings.warn(f"training continues without a sink: {failure}", RuntimeWarning, stacklevel=3)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
