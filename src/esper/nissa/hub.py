"""From the training loop to whoever watches, without ever making it wait.

            ┌──► bounded queue ──► thread ──► console
    publish ┼──► bounded queue ──► thread ──► TensorBoard
            └──► bounded queue ──► thread ──► W&B

A sink that is slow, fails or hangs does so alone: the others see everything. The log of a run does not pass through
here: it is written where things happen, and has them all.
"""

import atexit
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Protocol, Self

from esper.leyline.numbers import require_positive, require_whole
from esper.nissa.events import Event

CAPACITY = 1024
"""Events that wait for a sink at most. A round publishes one and its alarms: it may be hundreds of rounds behind."""
PATIENCE_S = 20.0
"""How long closing waits, for all sinks together. W&B needs 0.1 s where it is alone."""


class Sink(Protocol):
    """Shows events. Every call comes from one thread, the sink's own; whatever it raises switches the sink off."""

    @property
    def name(self) -> str:
        """For messages."""

    def open(self) -> None:
        """Comes first: make files, connect."""

    def write(self, event: Event) -> None:
        """Show it, or leave it; kinds may join."""

    def close(self) -> None:
        """Nothing comes after this."""


class _Line:
    """A sink with its queue and its thread. Each number has one writer: what was shown the line's thread, the others
    the one that trains."""

    def __init__(self, sink: Sink, capacity: int, failures: list[str]) -> None:
        self.sink, self.capacity, self.failures = sink, capacity, failures
        self.dropped = 0
        self.failed = False
        self._given_up = False
        self._sent = self._shown = 0
        # Putting into it takes no lock that the thread could hold, nor one that Ctrl-C could leave behind.
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        # A daemon, so that a sink that hangs cannot keep the process alive; hence the closing at exit.
        self._thread = Thread(target=self._work, name=f"esper-hub-{sink.name}", daemon=True)
        self._thread.start()

    def send(self, event: Event, closed: bool) -> None:
        """Queue it, or count it as dropped. A sink that was switched off misses nothing more: it is told as failed."""
        if self.failed:
            return
        if closed or self._queue.qsize() >= self.capacity:
            self.dropped += 1
        else:
            self._sent += 1
            self._queue.put(event)

    def end(self) -> None:
        """Nothing is sent after this."""
        self._queue.put(None)

    def join(self, deadline: float) -> bool:
        """Wait until the sink is closed or the deadline is there; whether it ended, by itself or by failing."""
        self._thread.join(max(0.0, deadline - monotonic()))
        return self.failed or not self._thread.is_alive()

    def give_up(self) -> None:
        """Count what it has in hand and what waits as dropped; should it ever go on, it is only closed."""
        self._given_up = True
        self.dropped += self._sent - self._shown

    def _work(self) -> None:
        if not self._try(self.sink.open):
            return
        while (event := self._queue.get()) is not None and not self._given_up:
            if not self._try(partial(self.sink.write, event)):
                with suppress(BaseException):
                    self.sink.close()
                return
            self._shown += 1
        self._try(self.sink.close)

    def _try(self, call: Callable[[], None]) -> bool:
        """Whether it worked; where it did not the sink is switched off."""
        try:
            call()
        except BaseException as error:  # also SystemExit, which would end the thread and tell nobody
            if not self._given_up:  # else it is told already
                self.failed = True
                self.failures.append(f"{self.sink.name} ({type(error).__name__}: {error})")
            return False
        return True


class Hub:
    """Hands events to sinks. Use it as a context manager: leaving it, or the interpreter, waits for what is queued.

    `publish` and `close` belong to one thread, that of the training loop. Ctrl-C reaches that one only. A hub without
    sinks does nothing and has no threads.
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, capacity: int = CAPACITY, patience_s: float = PATIENCE_S) -> None:
        require_whole("capacity", capacity, 1)
        require_positive("patience_s", patience_s)
        self.capacity, self.patience_s = capacity, patience_s
        self.failures: list[str] = []
        """Of sinks that were switched off, in words"""
        self._told = 0  # of the failures
        self._closed = False
        self._lines = [_Line(sink, capacity, self.failures) for sink in sinks]
        if self._lines:
            atexit.register(self.close)

    @property
    def dropped(self) -> int:
        """Events that sinks were too slow for, summed over the sinks: one that two sinks miss counts twice.

        A sink misses an event where its queue is full, or where it has not shown it when closing gives it up.
        """
        return sum(line.dropped for line in self._lines)

    def publish(self, event: Event) -> None:
        """Leave it to the sinks and return at once; a sink for which too many wait already does not get it."""
        for line in self._lines:
            line.send(event, self._closed)
        self._warn()

    def metrics(self) -> dict[str, int]:
        """For the line of a round; nothing without sinks."""
        return {"dropped": self.dropped, "failed": len(self.failures)} if self._lines else {}

    def losses(self) -> str:
        """In words, what which sink did not show; empty where all showed everything."""
        slow = [
            f"{line.sink.name} was too slow for {line.dropped} {'event' if line.dropped == 1 else 'events'}"
            for line in self._lines
            if line.dropped
        ]
        return "; ".join([*slow, *(f"switched off: {failure}" for failure in self.failures)])

    def close(self) -> None:
        """Let the sinks finish what is queued, then close them; those that hang are given up after a while."""
        if self._closed or not self._lines:
            return
        for line in self._lines:
            line.end()
        self._closed = True  # after the ends: where Ctrl-C comes between them, closing at exit does the rest
        deadline = monotonic() + self.patience_s
        for line in self._lines:
            if not line.join(deadline):
                line.give_up()
                self.failures.append(f"{line.sink.name} did not end within {self.patience_s:g} s")
        atexit.unregister(self.close)
        self._warn()

    def _warn(self) -> None:
        """Once for each failure, from the thread that trains: there a filter for warnings sees it."""
        while self._told < len(self.failures):
            failure = self.failures[self._told]
            self._told += 1
            warnings.warn(f"training goes on without a sink: {failure}", RuntimeWarning, stacklevel=3)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
