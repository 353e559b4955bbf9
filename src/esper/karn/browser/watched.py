"""The runs that somebody looks at: their followers, which one thread keeps up to date."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import NamedTuple

from esper.karn.browser.folder import Listed, RunFolders
from esper.karn.follower import LIVE, SESSIONS, RunFollower
from esper.karn.front_cache import FrontCache
from esper.karn.growth import GrowthRun
from esper.karn.page import Markup
from esper.karn.state import CONFIG, EVENTS, METRICS, RunState
from esper.leyline import BadValueError

FIRST_S = 1.0
"""Seconds that a run may be read before its first picture; the rest of a long log comes afterwards"""
FRONT_AFTER_S = 1.5
"""Seconds that a run is followed before the front of its log is read: its first picture is drawn and sent until then.
To load a stored front would hold that up by seconds"""
PAUSE_S = 0.25
UNWATCHED_S = 30.0
"""A run that nobody has asked for so long is no longer followed"""
STORED = 24
"""Drawn pages that are kept"""
_READ = (CONFIG, METRICS, EVENTS, SESSIONS, LIVE)


class Version(NamedTuple):
    """What a page depends on."""

    complete: int
    live: int
    behind: bool
    problems: int
    gone: bool
    refused: str


class Watched:
    """One run, for several threads: hold `lock` while its state is used."""

    def __init__(self, folders: RunFolders, run: Listed) -> None:
        self.folders, self.run, self.lock = folders, run, Lock()
        self.follower = RunFollower(run.path, cache=FrontCache())
        self.asked_at = self.front_at = time.monotonic()
        self.refused = ""
        """Why the run is no longer read"""
        self._drawn: dict[object, tuple[object, list[Markup]]] = {}

    @property
    def state(self) -> RunState | GrowthRun:
        """What is known of the run."""
        return self.follower.state

    def poll(self, seconds: float, *, front: bool = True) -> bool:
        """Read what is new, unless a file has become a link that leads out of the folder."""
        for name in _READ:
            path = self.run.path / name
            if path.exists() and self.folders.file(self.run, name) is None:
                raise BadValueError(f"{self.run.name}/{name} leads out of the folder and is not read")
        self.refused = ""
        with self.lock:
            return self.follower.poll(seconds, front=front)

    def read_first(self) -> None:
        """Read what a first picture needs; the front of a long log waits."""
        deadline = time.monotonic() + FIRST_S
        self.poll(0.02, front=False)
        while not self.follower.at_end and time.monotonic() < deadline:
            self.poll(0.02, front=False)
        self.front_at = time.monotonic() + FRONT_AFTER_S

    def follow(self) -> bool:
        """Read what is new, and the front of a long log once it is due; whether more can be read at once."""
        is_due = time.monotonic() >= self.front_at
        self.poll(0.05, front=is_due)
        read, size = self.follower.behind
        return is_due and read < size

    def version(self) -> Version:
        """Changes when the run does."""
        state, follower = self.state, self.follower
        live = 0 if state.live is None else state.live.trained
        read, size = follower.behind
        return Version(state.complete, live, read < size, len(follower.problems), follower.gone, self.refused)

    def drawn(self, key: object, version: object, draw: Callable[[], list[Markup]]) -> list[Markup]:
        """What was drawn for this key and version, or what is drawn now."""
        found = self._drawn.get(key)
        if found is None or found[0] != version:
            self._drawn.pop(key, None)
            self._drawn[key] = found = (version, draw())
            for oldest in list(self._drawn)[:-STORED]:
                del self._drawn[oldest]
        return found[1]


class WatchedRuns:
    """All runs of a folder that somebody looks at."""

    def __init__(self, folders: RunFolders) -> None:
        self.folders = folders
        self._runs: dict[str, Watched] = {}
        self._lock, self._stopped = Lock(), Event()

    def get(self, name: str) -> Watched:
        """A run by its name; it is followed from now on."""
        with self._lock:
            watched = self._runs.get(name)
            if watched is None:
                watched = Watched(self.folders, self.folders.find(name))
                watched.read_first()
                self._runs[name] = watched
            watched.asked_at = time.monotonic()
            return watched

    @contextmanager
    def following(self) -> Iterator[None]:
        """Keep the runs up to date while the block runs."""
        thread = Thread(target=self._follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(5)

    def _follow(self) -> None:
        while not self._stopped.is_set():
            busy = False
            with self._lock:
                for name, watched in list(self._runs.items()):
                    if time.monotonic() - watched.asked_at > UNWATCHED_S:
                        del self._runs[name]
                runs = list(self._runs.values())
            for watched in runs:
                try:
                    busy |= watched.follow()
                except BadValueError as error:
                    watched.refused = str(error)
            self._stopped.wait(0.005 if busy else PAUSE_S)
