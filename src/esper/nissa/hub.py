"""From the training loop to whoever watches, without ever making it wait.

    publish ──► bounded queue ──► one thread ──► console, TensorBoard, W&B

The log of a run does not pass through here: it is written where things happen, and has them all.
"""

import atexit
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Protocol, Self

from esper.leyline.numbers import require_positive, require_whole
from esper.nissa.events import Event

CAPACITY = 1024
"""Events that wait at most. A round publishes one and its alarms, so sinks may be hundreds of rounds behind."""
PATIENCE_S = 20.0
"""How long closing waits for the sinks. W&B needs 0.1 s where it is alone."""


class Sink(Protocol):
    """Shows events. Every call comes from the hub's thread; whatever it raises switches the sink off."""

    @property
    def name(self) -> str:
        """For messages."""

    def open(self) -> None:
        """Comes first: make files, connect."""

    def write(self, event: Event) -> None:
        """Show it, or leave it; kinds may join."""

    def close(self) -> None:
        """Nothing comes after this."""


class Hub:
    """Hands events to sinks. Use it as a context manager: leaving it, or the interpreter, waits for what is queued.

    `publish` and `close` belong to one thread, that of the training loop. Ctrl-C reaches that one only. A hub without
    sinks does nothing and has no thread.
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, capacity: int = CAPACITY, patience_s: float = PATIENCE_S) -> None:
        require_whole("capacity", capacity, 1)
        require_positive("patience_s", patience_s)
        self.capacity, self.patience_s = capacity, patience_s
        self.dropped = 0
        """Events that no sink was shown: the queue was full"""
        self.failures: list[str] = []
        """Of sinks that were switched off, in words"""
        self._told = 0  # of the failures
        self._working = list(sinks)  # the thread's own once it runs
        # Putting into it takes no lock that the thread could hold, nor one that Ctrl-C could leave behind.
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._closed = False
        self._thread: Thread | None = None
        if sinks:
            # A daemon, so that a sink that hangs cannot keep the process alive; hence the closing at exit.
            self._thread = Thread(target=self._work, name="esper-hub", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def publish(self, event: Event) -> None:
        """Leave it to the sinks and return at once; where too many wait already it is dropped and counted."""
        if self._thread is None:
            return
        if self._closed or self._queue.qsize() >= self.capacity:
            self.dropped += 1
        else:
            self._queue.put(event)
        self._warn()

    def metrics(self) -> dict[str, int]:
        """For the line of a round; nothing without sinks."""
        return {} if self._thread is None else {"dropped": self.dropped, "failed": len(self.failures)}

    def losses(self) -> str:
        """In words, what sinks did not show; empty where they showed everything."""
        slow = [f"sinks were too slow for {self.dropped} events"] if self.dropped else []
        return "; ".join([*slow, *(f"switched off: {failure}" for failure in self.failures)])

    def close(self) -> None:
        """Let the sinks finish what is queued, then close them; a sink that hangs is given up after a while."""
        if self._thread is None or self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join(self.patience_s)
        if self._thread.is_alive():
            self.dropped += self._queue.qsize() - 1
            names = ", ".join(sink.name for sink in self._working)
            self.failures.append(f"one of {names} did not end within {self.patience_s:g} s")
        atexit.unregister(self.close)
        self._warn()

    def _work(self) -> None:
        for sink in list(self._working):
            self._try(sink, sink.open)
        while (event := self._queue.get()) is not None:
            for sink in list(self._working):
                if not self._try(sink, partial(sink.write, event)):
                    with suppress(Exception):
                        sink.close()
        for sink in list(self._working):
            self._try(sink, sink.close)

    def _try(self, sink: Sink, call: Callable[[], None]) -> bool:
        """Whether it worked; a sink for which it did not is switched off."""
        try:
            call()
        except Exception as error:
            self._working.remove(sink)
            self.failures.append(f"{sink.name} ({type(error).__name__}: {error})")
            return False
        return True

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
