"""Sinks for tests: one that remembers, one that waits, one that fails."""

from threading import Event as Flag
from threading import get_ident

from esper.nissa import Event, RunBegun


def begun(number: int) -> Event:
    """An event that can be told from others."""
    return RunBegun("", number, 0, {}, None)


class Recorder:
    """Remembers everything, and who called."""

    def __init__(self, name: str = "recorder") -> None:
        self.name = name
        self.events: list[Event] = []
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def open(self) -> None:
        self.calls.append("open")
        self.threads.add(get_ident())

    def write(self, event: Event) -> None:
        self.events.append(event)
        self.threads.add(get_ident())

    def close(self) -> None:
        self.calls.append("close")
        self.threads.add(get_ident())

    @property
    def rounds(self) -> list[int]:
        """Of the events that came."""
        return [event.round for event in self.events]


class Slow(Recorder):
    """Waits at its first event until it is let go on."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.arrived, self.go_on = Flag(), Flag()

    def write(self, event: Event) -> None:
        self.arrived.set()
        assert self.go_on.wait(20)
        super().write(event)


class Broken(Recorder):
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__("broken")
        self.where = where

    def open(self) -> None:
        super().open()
        self._fail("open")

    def write(self, event: Event) -> None:
        super().write(event)
        self._fail("write")

    def close(self) -> None:
        super().close()
        self._fail("close")

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise OSError(f"no space to {where}")
